"""In which order the rates of a proof are tried, and what they prove."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from loadgen.doctor.trial import Trial


def prove(
    rates_per_s: Sequence[float], measure: Callable[[float], Trial], has_time: Callable[[], bool]
) -> tuple[Trial, ...]:
    """One trial per rate, ascending, while there is time; a rate that fails does not end it: how
    far off its numbers are is worth knowing, too. Time that is left goes to the rates that failed,
    the lowest first, each once more: on a shared machine others may have spoilt the first trial.
    The lowest rate is tried in any case.
    """
    found: list[Trial] = []
    for rate_per_s in rates_per_s:
        if found and not has_time():
            break
        found.append(measure(rate_per_s))
    for place, trial in enumerate(found):
        if not trial.holds and has_time():
            found[place] = measure(trial.rate_per_s)
    return tuple(found)


def proven_rate(tried: Iterable[tuple[float, bool]]) -> float | None:
    """The highest of the rates that hold with all below them; of (rate, whether it holds), None
    where not even the lowest does."""
    best = None
    for rate_per_s, holds in sorted(tried):
        if not holds:
            break
        best = rate_per_s
    return best
