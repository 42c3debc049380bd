"""Requests as a schedule states them before they are sent: send times, lengths and classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loadgen.studies.capacity.probe import Array


@dataclass(frozen=True)
class Traffic:
    """Requests in order of arrival, columns [n]. `at_s` are seconds since the start; `new_tokens`
    are the input tokens without a shared prefix."""

    at_s: Array
    input_tokens: Array
    new_tokens: Array
    output_tokens: Array
    class_id: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.at_s)

    @cached_property
    def tokens(self) -> Array:
        """[4, n]: 1, input, new and output tokens of each request, each at least a thousandth."""
        rows = (np.ones(len(self)), self.input_tokens, self.new_tokens, self.output_tokens)
        tokens: Array = np.maximum(np.stack(rows), 1e-3)
        return tokens


def joined(parts: Sequence[Traffic]) -> Traffic:
    """The requests of several probes, one probe after the other."""
    return Traffic(
        np.concatenate([part.at_s for part in parts]),
        np.concatenate([part.input_tokens for part in parts]),
        np.concatenate([part.new_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        np.concatenate([part.class_id for part in parts]),
    )


Law = Callable[[float, int], Traffic]
"""Traffic of the scenario at a load (arrivals per second), of about so many requests; equal
arguments give equal traffic."""
