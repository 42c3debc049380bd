"""How many prompt tokens a step may read without breaking a promise on the time between tokens."""

from __future__ import annotations

from reference_engine.state.cost_model import StepShape
from reference_engine.state.plan import View


def prefill_within(view: View, tpot_s: float, most: int, least: int) -> int:
    """The largest n in [`least`, `most`] such that a step of n prompt tokens beside all decodes
    takes at most `tpot_s` by the cost model; `least` where none does, so that prompts are read at
    all. Without decodes there is nobody to wait: `most`.

    The prompt tokens are priced as the continuation of the prompt being read now.
    Source: Sarathi-Serve (OSDI'24) §4.3, the token budget from profiling and the TBT SLO.
    """
    n_decode = len(view.decoding)
    if not n_decode:
        return most
    before = next((request.n_computed for request in view.prefilling), 0)
    low, high = least, max(least, most)
    while low < high:
        n = (low + high + 1) // 2
        shape = StepShape(
            n_seqs=n_decode + 1,
            prefill_tokens=n,
            prefill_attention=n * (before + n / 2),
            n_decode=n_decode,
            context_tokens=view.decode_context_tokens,
        )
        if view.cost.estimate(shape) <= tpot_s:
            low = n
        else:
            high = n - 1
    return low
