"""The rates of the trials: the search for the highest rate that a worker measures accurately on
this machine (its ceiling), and the proof at fixed rates."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadgen.run.cores import CEILING_FILE, machine_name
from loadgen.studies.doctor.trial import Trial
from loadgen.system.whole_file import replacing

FIRST_RATE_PER_S = 100.0
LOWEST_RATE_PER_S = 5.0
HIGHEST_RATE_PER_S = 6400.0
_CLOSE_ENOUGH = 1.15  # ratio of the lowest rate that failed to the highest that held


@dataclass(frozen=True)
class Ceiling:
    """`best` is the trial at the highest rate that held, None if no rate held; `is_open` is True if
    no higher rate failed. `trials` are in the order of their measurement."""

    best: Trial | None
    is_open: bool
    trials: tuple[Trial, ...]


def find_ceiling(measure: Callable[[float], Trial], has_time: Callable[[], bool]) -> Ceiling:
    """Doubles the rate until it fails, then halves the gap (as a ratio) while there is time.

    A rate fails when two trials in a row fail: on a shared machine, other programs may spoil a
    trial. The first trial always takes place.
    """
    trials: list[Trial] = []

    def attempt(rate_per_s: float) -> Trial:
        trials.append(measure(rate_per_s))
        if not trials[-1].holds and has_time():
            trials.append(measure(rate_per_s))
        return trials[-1]

    best, failed = None, math.inf
    rate_per_s: float | None = FIRST_RATE_PER_S
    while rate_per_s is not None:
        trial = attempt(rate_per_s)
        if trial.holds:
            best = trial
        else:
            failed = rate_per_s
        rate_per_s = next_rate(best.rate_per_s if best else 0.0, failed) if has_time() else None
    return Ceiling(best, best is not None and math.isinf(failed), tuple(trials))


def next_rate(held_per_s: float, failed_per_s: float) -> float | None:
    """The next rate between the highest that held (0: none) and the lowest that failed (inf: none);
    None if the gap is small enough."""
    if math.isinf(failed_per_s):
        return held_per_s * 2 if held_per_s < HIGHEST_RATE_PER_S else None
    if not held_per_s:
        return failed_per_s / 4 if failed_per_s / 4 >= LOWEST_RATE_PER_S else None
    if failed_per_s < held_per_s * _CLOSE_ENOUGH:
        return None
    return float(f"{math.sqrt(held_per_s * failed_per_s):.3g}")


def ceiling_file(best: Trial, now: datetime | None = None) -> dict[str, Any]:
    """The content of the file for `--workers auto`: token events per second that a core of this
    machine can measure."""
    return {
        "events_per_s_per_core": round(best.tokens_per_s, 1),
        "machine": machine_name(),
        "measured_utc": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def write_ceiling(best: Trial, cache_dir: Path) -> Path:
    """Writes the ceiling to the cache directory; returns the path of the file."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / CEILING_FILE
    with replacing(path) as partial:
        partial.write_text(json.dumps(ceiling_file(best), indent=2) + "\n")
    return path


def prove(
    rates_per_s: Sequence[float], measure: Callable[[float], Trial], has_time: Callable[[], bool]
) -> tuple[Trial, ...]:
    """A trial per rate, ascending, while there is time. A failed rate does not end the proof,
    because the size of its error is of interest too. The remaining time goes to another trial of
    each failed rate, the lowest first: on a shared machine, other programs may have spoilt the
    first. The lowest rate is always tried."""
    trials: list[Trial] = []
    for rate_per_s in rates_per_s:
        if trials and not has_time():
            break
        trials.append(measure(rate_per_s))
    for index, trial in enumerate(trials):
        if not trial.holds and has_time():
            trials[index] = measure(trial.rate_per_s)
    return tuple(trials)


def proven_rate(tried: Iterable[tuple[float, bool]]) -> float | None:
    """The highest rate that held together with all lower rates, from pairs (rate, whether it held);
    None if the lowest failed."""
    best = None
    for rate_per_s, holds in sorted(tried):
        if not holds:
            break
        best = rate_per_s
    return best
