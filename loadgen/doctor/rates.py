"""The generator's ceiling on this machine: the highest rate that one worker measures truly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadgen.doctor.trial import Trial
from loadgen.run.cores import CEILING_FILE, machine_name

FIRST_RATE_PER_S = 100.0
LOWEST_RATE_PER_S = 5.0
HIGHEST_RATE_PER_S = 6400.0
_CLOSE_ENOUGH = 1.15  # ratio of the lowest rate that failed to the highest that held


@dataclass(frozen=True)
class Ceiling:
    """`best` is the trial at the highest rate that held, None where none did; `is_open` where no
    higher rate failed. `trials` in the order they were made.
    """

    best: Trial | None
    is_open: bool
    trials: tuple[Trial, ...]


def find_ceiling(measure: Callable[[float], Trial], has_time: Callable[[], bool]) -> Ceiling:
    """Double the rate until it fails, then halve the gap, in ratios, while there is time.

    A rate fails when it does so twice in a row: on a shared machine one trial may be spoilt by
    others. The first trial is made in any case.
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
    """The rate to try between the highest that held (0: none) and the lowest that failed (inf:
    none); None when enough is known.
    """
    if math.isinf(failed_per_s):
        return held_per_s * 2 if held_per_s < HIGHEST_RATE_PER_S else None
    if not held_per_s:
        return failed_per_s / 4 if failed_per_s / 4 >= LOWEST_RATE_PER_S else None
    if failed_per_s < held_per_s * _CLOSE_ENOUGH:
        return None
    return float(f"{math.sqrt(held_per_s * failed_per_s):.3g}")


def ceiling_file(best: Trial, now: datetime | None = None) -> dict[str, Any]:
    """What `--workers auto` reads: token events a second that one core of this machine holds."""
    return {
        "events_per_s_per_core": round(best.tokens_per_s, 1),
        "machine": machine_name(),
        "measured_utc": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def write_ceiling(best: Trial, cache_dir: Path) -> Path:
    """Keep the ceiling in the cache directory; the path of the file."""
    cache_dir.mkdir(parents=True, exist_ok=True)
    path = cache_dir / CEILING_FILE
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(ceiling_file(best), indent=2) + "\n")
    unfinished.replace(path)
    return path


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
