"""What `slobench capacity` does."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from loadgen.cli.parse import (
    cache_dir,
    read_duration_s,
    read_share,
    read_workers,
    watched_together,
)
from loadgen.cli.terminal import print_json, stdout
from loadgen.errors import UsageError, nearest
from loadgen.units import parse_rate_per_s

if TYPE_CHECKING:
    from loadgen.run.run_options import Watch
    from loadgen.workload.scaling import Over
    from loadgen.workload.scenario import Scenario


def capacity(
    scenario: Scenario,
    target: str | None,
    attainment: str | None,
    over: str,
    between: str | None,
    budget: str | None,
    confidence: str,
    precision: str,
    out: Path | None,
    resume: bool,
    model: str,
    engine: str,
    workers: str,
    plugins: Sequence[Path],
    watch: Watch,
    as_json: bool,
) -> int:
    """Search, print the probes and the answer; the exit code."""
    from loadgen.capacity.capacity_spec import CapacitySpec
    from loadgen.capacity.search import search
    from loadgen.run.run_options import RunOptions
    from reports.capacity.view import table

    chosen = target or os.environ.get("OPENAI_BASE_URL")
    if not chosen:
        raise UsageError(
            "which server? Add --target URL, a target file, `reference`, `sim` or `mock` "
            "(OPENAI_BASE_URL is not set either)"
        )
    if resume and out is None:
        raise UsageError("--resume: which search? Name its directory with --out")
    scaling = _over(over)
    options = RunOptions(
        n_workers=read_workers(workers),
        engine=engine,
        model=model,
        command=["slobench", *sys.argv[1:]],
        environ=dict(os.environ),
        cache_dir=cache_dir(os.environ),
        plugins=plugins,
    )
    asked = CapacitySpec(
        scenario=scenario,
        target=chosen,
        options=options,
        over=scaling,
        attainment=None if attainment is None else read_share("--attainment", attainment),
        between=None if between is None else _between(between, scaling),
        budget_s=math.inf if budget is None else read_duration_s("--budget", budget),
        confidence=_inside("--confidence", confidence, 0.5, 0.999),
        precision=_inside("--precision", precision, 0.002, 0.5),
    )
    console = Console(stderr=True, highlight=False)
    with watched_together(watch, [chosen]) as each:
        asked = replace(asked, options=replace(options, watch=each))
        answer = search(asked, out, console, resume=resume)
    if as_json:
        print_json(answer.to_json())
    else:
        stdout().print(table(answer))
    return answer.exit_code


def _over(word: str) -> Over:
    known: tuple[Over, Over] = ("rate", "concurrency")
    for over in known:
        if word == over:
            return over
    raise UsageError(f"--over {word}: {nearest(word, known)}")


def _between(text: str, over: Over) -> tuple[float, float]:
    """`1/s:40/s`, or `1:64` users."""
    low, colon, high = text.partition(":")
    example = "1/s:40/s" if over == "rate" else "1:64"
    try:
        if not colon:
            raise ValueError("two loads are needed")
        read = parse_rate_per_s if over == "rate" else _users
        ends = read(low), read(high)
    except ValueError as error:
        raise UsageError(f"--between {text}: {error}; write e.g. {example}") from None
    if not ends[0] < ends[1]:
        raise UsageError(f"--between {text}: the first must be the lower one, e.g. {example}")
    return ends


def _users(text: str) -> float:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is no number of users")
    return float(text)


def _inside(flag: str, text: str, least: float, most: float) -> float:
    share = read_share(flag, text)
    if not least <= share <= most:
        raise UsageError(f"{flag} {text}: expected {100 * least:g} % to {100 * most:g} %")
    return share
