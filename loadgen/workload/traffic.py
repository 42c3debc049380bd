"""What a source of requests says about each of them: the instants, and whatever more it knows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadgen.records import Times

Column = NDArray[np.uint32]
Limits = NDArray[np.float64]  # seconds


@dataclass(frozen=True, slots=True)
class Traffic:
    """One entry per request, all arrays of the same length [n]; None where the source does not say
    and the scenario decides.

    `scheduled_s`: seconds, sorted, in [0, horizon). `input_tokens` counts the whole prompt, its
    `prefix_tokens` included; rows with one `prefix_id` (from 1; 0 = none) begin with the same text,
    as far as the shorter of their prefixes goes. Rows with one `session_id` belong together and are
    never split over load generators. `class_name` names a class of the scenario. `…_slo_s` is what
    each request was promised, in seconds; 0 where it was nothing of its own.
    """

    scheduled_s: Times
    input_tokens: Column | None = None
    output_tokens: Column | None = None
    prefix_id: Column | None = None
    prefix_tokens: Column | None = None
    session_id: Column | None = None
    class_name: NDArray[np.str_] | None = None
    ttft_slo_s: Limits | None = None
    tpot_slo_s: Limits | None = None
    e2e_slo_s: Limits | None = None

    def __len__(self) -> int:
        return len(self.scheduled_s)
