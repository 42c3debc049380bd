"""How the requests in the rows of a block table choose their tokens, as arrays.

What does not change while a request runs is looked at once, when it gets its row: to look at 256
of them again in each step takes longer than planning it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference_engine.model.sampling import keys
from reference_engine.state.sequence import Request, Sampling

Ints = NDArray[np.int32]
_FOR_EVER = (1 << 31) - 1


class SamplingTable:
    """Of `n_rows` rows."""

    def __init__(self, n_rows: int) -> None:
        self._n_prompt = np.zeros(n_rows, np.int32)
        self._asks_until = np.zeros(n_rows, np.int32)  # this number of its output
        self._temperatures = np.zeros(n_rows, np.int32)  # bits of float32, 0 is greedy
        self._seeds = np.zeros(n_rows, np.uint64)

    def seat(self, row: int, request: Request) -> None:
        how = request.sampling
        self._n_prompt[row] = request.n_prompt
        banned_until = request.min_tokens if request.stop_ids else 0
        self._asks_until[row] = (
            _FOR_EVER if how.logprobs or is_cut(how) else min(banned_until, _FOR_EVER)
        )
        self._temperatures[row] = np.float32(max(how.temperature, 0.0)).view(np.int32)
        self._seeds[row] = how.seed & ((1 << 64) - 1)

    def n_outputs(self, rows: Ints, positions: Ints) -> Ints:
        """How many tokens of its answer each has that computes its last known one, at `positions`
        [n]."""
        outputs: Ints = positions - self._n_prompt.take(rows)
        outputs += 1
        return outputs

    def asking(self, rows: Ints, n_outputs: Ints) -> list[int]:
        """Which of them ask for more than a temperature."""
        asks = n_outputs < self._asks_until.take(rows)
        return np.flatnonzero(asks).tolist() if asks.any() else []

    def draws(self, rows: Ints, n_outputs: Ints, out: Ints) -> None:
        """Temperature bits and keys, [3, n]; zeros are greedy."""
        out[0] = self._temperatures.take(rows)
        out[1:] = 0
        if out[0].any():
            hot = np.flatnonzero(out[0])
            bits = keys(self._seeds[rows[hot]], n_outputs[hot])
            out[1:, hot] = bits.view(np.int32).reshape(-1, 2).T


def is_cut(how: Sampling) -> bool:
    """Whether some tokens cannot be drawn, however they come."""
    return how.temperature > 0 and (how.top_k > 0 or how.top_p < 1)
