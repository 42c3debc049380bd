"""A table of claims as text, Markdown and rows of a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from loadgen.measure.wording import format_number, format_share
from loadgen.studies.claims.catalog import CLAIMS, SOURCES
from loadgen.studies.claims.claim import SEED, SEEDS, Unit
from loadgen.studies.claims.result import ClaimRow, ClaimsFile

HEAD = ("system", "claimed", "our workload", "ours", "honest statement")
_WIDTH = 98
_NO_CHANGE = 0.005  # per cent
_INTRODUCTION = """\
# Claims about batching, re-measured

Four texts about batching in LLM servers, and the papers that they cite, name some forty systems
with numbers beside them. Each has a row here: the claim, a workload that tests it, our number, and
what can be said honestly. The letter behind a claim is its source, listed at the end.
"""
_METHOD = """\
## How to read it

- **ours** is simulated in virtual time with the [cost model](engine-lab.md#the-cost-of-a-step) of
  an 8B model on an H200, unless the workload names another: a prediction about scheduling, not a
  measurement of a GPU. *Computed* numbers follow from a formula, exact averages or drawn lengths.
  *Recorded* numbers were measured on the hardware named, and are stored in `benchmarks/results/`.
- `2.9×` is ours over the other side, with the same requests; `−60 %` the same as a change.
- The range behind it is a prediction interval ({confidence}): there the same number is expected if
  the study is repeated with {n_seeds} other seeds. Ratios are averaged as logarithms.
- *Holds* gives the range in which the statement is true; a value outside would contradict it.

`--only KEY` measures single rows (the keys are those of `claims.json`), `--seed` and `--seeds`
choose other schedules, and `--repeats N` measures everything again with N further sets of them and
counts the numbers inside their ranges. `--workers` sets the simulating processes. Ctrl-C keeps the
finished simulations; the same command with `--out DIR --resume` continues. The study writes
`claims.json`, `claims.md` (this page) and `claims.html`. The exit code is 3 if a statement is
contradicted or a number is missing.
"""


def value_text(value: float | None, unit: Unit) -> str:
    """`2.9×`, `−60 %`, `98.9 %` or `18`."""
    if value is None:
        return "–"
    if unit == "times":
        return f"{format_number(value)}×"
    if unit == "change":
        percent = 100 * (value - 1)
        shown = f"{abs(percent):.0f}" if abs(percent) >= 10 else f"{abs(percent):.2g}"
        shown = "0" if abs(percent) < _NO_CHANGE else shown
        sign = "" if shown == "0" else "−" if percent < 0 else "+"
        return f"{sign}{shown} %"
    return format_share(value) if unit == "share" else format_number(value)


def ours_text(row: ClaimRow) -> str:
    """The value with its interval and how it was found."""
    if row.value.value is None:
        return row.method
    ends = [value_text(end, row.unit) for end in (row.value.low, row.value.high) if end is not None]
    value = value_text(row.value.value, row.unit)
    interval = f" ({ends[0]} to {ends[1]})" if ends and ends != [value, value] else ""
    how = "" if row.method == "simulated" else f", {row.method}"
    return f"{value}{interval}{how}"


def bounds_text(row: ClaimRow) -> str:
    """`holds from 2× to 4×`; empty for a row without bounds."""
    low, high = (
        None if bound is None else value_text(bound, row.unit)
        for bound in (row.low_bound, row.high_bound)
    )
    if low is None and high is None:
        return ""
    if low is None:
        return f"up to {high}"
    return f"from {low}" if high is None else f"{low} to {high}"


def statement_text(row: ClaimRow) -> str:
    """The statement with the range in which it holds, and a contradiction where there is one."""
    bounds = bounds_text(row)
    held = f" Holds {bounds}." if bounds else ""
    return f"{row.statement}{held}{' CONTRADICTED here.' if row.holds is False else ''}"


def cells(row: ClaimRow) -> tuple[str, ...]:
    """A row in the order of HEAD."""
    claimed = f"{row.claimed} [{row.source}]"
    return row.system, claimed, row.workload, ours_text(row), statement_text(row)


def topics(result: ClaimsFile) -> Iterator[tuple[str, list[ClaimRow]]]:
    for topic, rows in groupby(result.rows, lambda row: row.topic):
        yield topic, list(rows)


def headline(result: ClaimsFile) -> str:
    """The number of claims with a number here, and what failed."""
    n_known = sum(row.value.value is not None for row in result.rows)
    parts = [f"{n_known} of {len(result.rows)} claims have a number here"]
    if result.contradicted:
        parts.append(f"statements contradicted: {', '.join(result.contradicted)}")
    if result.unfinished:
        parts.append(f"no number: {', '.join(result.unfinished)}")
    if repeats := repeats_text(result):
        parts.append(repeats)
    return "; ".join(parts)


def repeats_text(result: ClaimsFile) -> str:
    """How many repeats with other seeds were inside their interval; empty without repeats."""
    if not result.n_repeated:
        return ""
    share = format_share(result.n_inside / result.n_repeated)
    return (
        f"{result.n_inside} of {result.n_repeated} repeats with other seeds ({share}) inside their "
        "interval"
    )


def lines(result: ClaimsFile) -> Iterator[str]:
    """The result and a line per claim."""
    yield headline(result)
    for topic, rows in topics(result):
        yield f"{topic}:"
        for row in rows:
            yield f"  {row.key:24} {row.claimed:44.44} {ours_text(row)}"


def command(result: ClaimsFile) -> str:
    """The command that makes the table."""
    keys, first = [row.key for row in result.rows], result.seeds[0]
    only = [] if keys == [claim.key for claim in CLAIMS] else [f"--only {key}" for key in keys]
    flags = {"seed": (first[0], SEED), "seeds": (len(first), SEEDS)}
    flags["repeats"] = (len(result.seeds) - 1, 0)
    words = [f"--{name} {value}" for name, (value, default) in flags.items() if value != default]
    return " ".join(["slobench claims", *only, *words])


def markdown(result: ClaimsFile) -> str:
    """The table as a page of documentation."""
    n_seeds = len(result.seeds[0])
    parts = [_INTRODUCTION, f"    {command(result)}\n"]
    if repeats := repeats_text(result):
        parts.append(f"In this run, {repeats}.\n")
    method = _METHOD.format(confidence=f"{100 * result.confidence:g} %", n_seeds=n_seeds)
    parts.append(method)
    for topic, rows in topics(result):
        parts.append(f"## {topic}\n\n{_table(HEAD, [cells(row) for row in rows])}\n")
    sources = "\n".join(
        textwrap.fill(
            f"- **{letter}**: {text}", _WIDTH, subsequent_indent="  ", break_on_hyphens=False
        )
        for letter, text in SOURCES.items()
    )
    parts.append(f"## Sources\n\n{sources}\n")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source_rows(sources: Mapping[str, str] = SOURCES) -> list[tuple[str, str]]:
    return list(sources.items())
