"""A search for settings as lines of text: the choice, why, and how to use it."""

from __future__ import annotations

from collections.abc import Iterator

from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.measure.wording import format_value
from loadgen.studies.tune.result import TriedSetting, TuneFile

_MOST_SEARCHED = 12


def lines(result: TuneFile) -> Iterator[str]:
    """The choice with its interval, the comparison with the others, effects of the knobs, and the
    command that uses it."""
    yield headline(result)
    yield from (f"  {line}" for line in reasons(result))
    where = "simulated" if result.target == "sim" else f"measured on {result.target}"
    yield f"confirmed on {len(result.confirmed_seeds)} other seeds ({where}):"
    yield from _table(result.confirmed)
    yield (
        f"searched: {len(result.searched)} candidates, {result.n_runs} of {result.n_exhaustive} "
        "simulations; those that stayed longest first:"
    )
    yield from _table(result.searched[:_MOST_SEARCHED])
    yield f"use it: {command(result)}"


def headline(result: TuneFile) -> str:
    chosen, slos = result.chosen, ", ".join(result.slo) or "their SLOs"
    return (
        f"{chosen.label}: goodput {_estimate(chosen.goodput)} req/s, "
        f"{format_value(chosen.attainment.value, 'share')} met {slos}"
    )


def reasons(result: TuneFile) -> Iterator[str]:
    """Paired differences to the runner-up, the mode as it is, and the same settings with another
    value of each knob."""
    for row in result.confirmed[1:]:
        named = " as it is" if row.label == result.baseline else ""
        yield f"{_gain(row.difference)} {row.label}{named}"
    for row in neighbours(result):
        yield f"{_gain(row.difference)} {row.label} (in the search)"


def neighbours(result: TuneFile) -> list[TriedSetting]:
    """The candidates of the search that differ from the choice in the value of one knob and were
    not confirmed."""
    chosen, confirmed = result.chosen, {row.label for row in result.confirmed}
    return [
        row
        for row in result.searched
        if row.mode == chosen.mode
        and row.label not in confirmed
        and sum(row.parameters[key] != chosen.parameters.get(key) for key in row.parameters) == 1
    ]


def command(result: TuneFile) -> str:
    """The command that serves with the choice."""
    parameters = " ".join(f"--set {key}={v}" for key, v in result.chosen.parameters.items())
    return f"slobench serve --mode {result.chosen.mode} {parameters}".rstrip()


def _gain(difference: EstimateSection | None) -> str:
    """`1.3 req/s [0.2, 2.4] more than`, or that no difference is proven."""
    if difference is None or difference.value is None:
        return "not comparable with"
    if difference.low is None or difference.high is None:
        return f"{difference.value:.3g} req/s more (one seed) than"
    ends = f"[{difference.low:.3g}, {difference.high:.3g}]"
    if difference.low <= 0 <= difference.high:
        return f"no proven difference, {difference.value:.3g} req/s {ends}, from"
    return f"{difference.value:.3g} req/s {ends} more than"


def _table(rows: list[TriedSetting]) -> Iterator[str]:
    yield f"  {'goodput, req/s':>24} {'SLO met':>9} {'TTFT p99':>9} {'TPOT p99':>9} {'seeds':>5}"
    for row in rows:
        met = format_value(row.attainment.value, "share")
        ttft, tpot = (format_value(v.value, "s") for v in (row.ttft_p99, row.tpot_p99))
        yield (
            f"  {_estimate(row.goodput):>24} {met:>9} {ttft:>9} {tpot:>9} {row.goodput.n:>5}  "
            f"{row.label}"
        )


def _estimate(value: EstimateSection) -> str:
    if value.value is None:
        return "–"
    if value.low is None or value.high is None:
        return f"{value.value:.4g}"
    return f"{value.value:.4g} [{value.low:.4g}, {value.high:.4g}]"
