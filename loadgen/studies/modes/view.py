"""Tables and sentences of a comparison of batching modes, shared by the page and the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loadgen.measure.catalog import Unit
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.measure.wording import format_number, format_value
from loadgen.studies.modes.result import Leader, ModeRow, ModesFile, ModesHead
from loadgen.units import format_duration
from reports.ending import MOST_FINDINGS, Ending, EndingRow, NextStep

COLUMNS: tuple[tuple[str, str, Unit], ...] = (
    ("TTFT p50", "ttft_p50", "s"),
    ("TTFT p99", "ttft_p99", "s"),
    ("TPOT p50", "tpot_p50", "s"),
    ("TPOT p99", "tpot_p99", "s"),
    ("ITL p50", "itl_p50", "s"),
    ("ITL p99", "itl_p99", "s"),
    ("goodput", "goodput", "per_s"),
    ("SLO met", "attainment", "share"),
    ("tokens/s", "output_tokens_per_s", "per_s"),
)
ALL = "all"
_MOST_REASONS = 3
_MOST_RATES = 5  # in a table
_MOST_MODES = 5  # in an ending

SIMULATED = "simulated (cost model): good for ranking, not for absolute numbers"


def tables(result: ModesFile) -> Group:
    """The comparison in a terminal of 100 columns."""
    parts: list[RenderableType] = [Text(heading(result), style="bold")]
    if result.rates_per_s is None:
        parts.append(_numbers(result))
        if len(result.modes) > 1:
            parts.append(_ratios(result))
        parts.append(_waits(result))
    else:
        slices = _side_by_side(result.rates_per_s)
        parts += [_by_rate(result, rates, "goodput", "per_s") for rates in slices]
        parts += [_by_rate(result, rates, "attainment", "share") for rates in slices]
        if len(result.modes) > 1:
            parts += [*(_differences(result, rates) for rates in slices), _ratios(result)]
    parts += [Text(f"note: {note}", style="yellow") for note in notes(result)]
    return Group(*parts)


def ending(result: ModesFile) -> Ending:
    """The comparison in about ten lines: the best mode, and a line per mode."""
    best = lead(result)
    findings = notes(result)
    rows = [_ending_row(result, mode) for mode in result.modes]
    is_tie = bool(result.leaders) and result.leaders[-1].difference.value == 0
    word, found = "EQUAL" if is_tie else "BEST", best[-1] if best else "no mode was measured"
    facts = [("compared", heading(result)), *(("also", text) for text in best[:-1][-1:])]
    by_verdict = {
        verdict: [mode for mode in result.modes if _verdict(result, mode) == verdict]
        for verdict in ("met", "missed")
    }
    if all(by_verdict.values()) and not result.rates_per_s:
        facts.insert(0, ("goodput", f"{word.lower()}: {found}"))
        met, missed = (" and ".join(modes) for modes in by_verdict.values())
        word, found = "MET", f"{met}; missed by {missed}"
    return Ending(
        "invalid" if result.n_untrusted else "met",
        word,
        found,
        rows=tuple(rows[:_MOST_MODES]),
        facts=tuple(facts),
        findings=tuple(findings[:MOST_FINDINGS]),
        next=None
        if result.rates_per_s
        else NextStep("Find the highest rate of each mode that meets the SLO: add --capacity"),
        n_rows=max(0, len(rows) - _MOST_MODES),
        n_findings=max(0, len(findings) - MOST_FINDINGS),
        noun="mode",
    )


def _verdict(result: ModesFile, mode: str) -> str:
    """The verdict of all runs of a mode; "" where they differ, and without a run."""
    verdicts = {cell.verdict for cell in result.cells if cell.mode == mode}
    return next(iter(verdicts)) if len(verdicts) == 1 else ""


def _ending_row(result: ModesFile, mode: str) -> EndingRow:
    """`goodput 3.7/s, SLO met 100 %, TTFT p99 10.6 ms`; with rates the goodput at each."""
    rows = [row for row in whole(result) if row.mode == mode]
    if result.rates_per_s is not None:
        parts = [
            f"{value_text(row.goodput, 'per_s', is_short=True)} at {row.rate_per_s:g}/s"
            for row in rows
            if row.rate_per_s is not None
        ]
        return EndingRow(
            "", mode, f"goodput per s: {', '.join(parts)}" if parts else "not measured"
        )
    if not rows:
        return EndingRow("", mode, "not measured")
    shown: tuple[tuple[str, str, Unit], ...] = (
        ("goodput", "goodput", "per_s"),
        ("SLO met", "attainment", "share"),
        ("TTFT p99", "ttft_p99", "s"),
        ("TPOT p99", "tpot_p99", "s"),
    )
    parts = []
    for title, key, unit in shown:
        estimate = getattr(rows[0], key)
        if estimate.value is not None:
            of_time = "/s" if unit == "per_s" else ""
            parts.append(f"{title} {value_text(estimate, unit, is_short=True)}{of_time}")
    mark = {"met": "✓", "missed": "✗"}.get(_verdict(result, mode), "")
    return EndingRow(mark, mode, ", ".join(parts) or "no value")


def heading(result: ModesHead) -> str:
    """Scenario, target, settings and seeds, as a line."""
    seeds = result.seeds
    over = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]}-{seeds[-1]}"
    where = "simulated" if result.target == "sim" else "on the bundled engine"
    settings = " ".join(f"{key}={value}" for key, value in result.settings.items())
    return f"{result.scenario}, {where}{' with ' + settings if settings else ''}, {over}"


def notes(result: ModesFile) -> list[str]:
    """Warnings on how far the numbers can be trusted."""
    texts = []
    if result.n_done < result.n_cells:
        texts.append(f"only {result.progress}")
    if result.n_untrusted:
        texts.append(
            f"{result.n_untrusted} runs cannot be trusted; see their reports, or the reasons in "
            "modes.json"
        )
    texts += [f"{place}: no valid run" for place in result.without_valid_run]
    if result.target == "sim":
        texts.append(SIMULATED)
    return texts


def lead(result: ModesFile) -> list[str]:
    """The mode with the best goodput, a sentence for each rate."""
    sentences = []
    for rate in result.rates_per_s or (None,):
        measured = [
            row
            for row in result.rows
            if not row.class_name and row.rate_per_s == rate and row.goodput.value is not None
        ]
        if not measured:
            continue
        best = max(measured, key=lambda row: row.goodput.value or 0.0)
        alike = [row.mode for row in measured if row.goodput.value == best.goodput.value]
        at = "" if rate is None else f"At {rate:g}/s: "
        goodput = value_text(best.goodput, "per_s")
        share = value_text(best.attainment, "share", is_short=True)
        met = "" if best.attainment.value is None else f" ({share} of requests met the SLO)"
        sentences.append(
            f"{at}{' and '.join(alike)}, goodput {goodput}/s{met}{_gain(result.leaders, rate)}"
        )
    return sentences


def _gain(leaders: Sequence[Leader], rate_per_s: float | None) -> str:
    """Goodput gained over the runner-up with the same requests, and whether it may be chance."""
    leader = next(one for one in leaders if one.rate_per_s == rate_per_s)
    gap = leader.difference
    if leader.runner_up is None or not gap.value:
        return ""
    gain = f"; {gap.value:+.3g}/s over the runner-up {leader.runner_up}"
    if gap.low is None or gap.high is None or gap.n < 2:
        return f"{gain} (one seed)"
    doubt = "" if gap.low > 0 else ", may be chance"
    return f"{gain} [{gap.low:+.3g}, {gap.high:+.3g}]{doubt}"


def value_text(estimate: EstimateSection, unit: Unit, is_short: bool = False) -> str:
    """`431 ms ±12`: the value and half the width of its confidence interval, in the same unit."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if value is None:
        return "–"
    text = format_number(value) if unit == "per_s" else format_value(value, unit)
    if is_short or estimate.n < 2 or low is None or high is None:
        return text
    half = (high - low) / 2
    if half <= 1e-9 * abs(value):  # a rounding error
        half = 0.0
    words = format_number(half) if unit == "per_s" else format_value(half, unit)
    number, _, suffix = words.rpartition(" ")
    return f"{text} ±{number if suffix and text.endswith(suffix) and number else words}"


def waits_text(row: ModeRow) -> str:
    """`0.61 s behind, 0.12 s no token budget`: seconds per request, the longest waits first."""
    parts = [
        f"{format_duration(seconds)} {reason.replace('_', ' ')}"
        for reason, seconds in list(row.waits_s.items())[:_MOST_REASONS]
        if seconds > 0
    ]
    return ", ".join(parts) or "–"


def _numbers(result: ModesFile) -> Table:
    """A row per mode for all traffic, and below it a row per class."""
    titles = ("TTFT p50, p99", "TPOT p50, p99", "ITL p99", "goodput", "SLO met", "tokens/s")
    table = _table("mode", *titles)
    for row in result.rows:
        pairs = [
            ", ".join(
                value_text(getattr(row, f"{name}_{key}"), "s", is_short=True)
                for key in ("p50", "p99")
            )
            for name in ("ttft", "tpot")
        ]
        rest = [c for c in COLUMNS if c[1] in ("itl_p99", "goodput", "attainment")]
        table.add_row(
            _first_cell(row),
            *pairs,
            *(value_text(getattr(row, key), unit, is_short=True) for _, key, unit in rest),
            value_text(row.output_tokens_per_s, "per_s", is_short=True),
        )
    return table


def _ratios(result: ModesFile) -> Table:
    """Ratios of every other mode to the first, for the same requests; with rates, at each rate."""
    titles = {key: title for title, key, _ in COLUMNS if key in result.rows[0].ratio}
    table = _table(f"ratio to {result.baseline}", *titles.values())
    rows = result.rows
    if result.rates_per_s is not None:
        rows = [row for mode in result.modes for row in whole(result) if row.mode == mode]
    for row in rows:
        if row.mode != result.baseline:
            table.add_row(_first_cell(row), *(times_text(row.ratio[key]) for key in titles))
    return table


def times_text(estimate: EstimateSection) -> str:
    """`0.036 (0.031 to 0.042)`: the ratio and its confidence interval."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if value is None:
        return "–"
    if estimate.n < 2 or low is None or high is None:
        return _times(value)
    return f"{_times(value)} ({_times(low)} to {_times(high)})"


def _times(ratio: float) -> str:
    """Two digits, never in scientific notation."""
    if ratio < 0.001:
        return "<0.001"
    if ratio > 1000:
        return ">1000"
    return f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:.0f}"


def _waits(result: ModesFile) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column("mode", overflow="fold")
    table.add_column("waiting time per request, by reason", overflow="fold")
    for row in result.rows:
        table.add_row(_first_cell(row), waits_text(row))
    return table


def _first_cell(row: ModeRow) -> str:
    if row.class_name:
        return f"  {row.class_name}"
    rate = row.rate_per_s
    return str(row.mode) if rate is None else f"{row.mode} at {rate:g}/s"


def _side_by_side(rates: Sequence[float]) -> list[Sequence[float]]:
    """The rates in as few slices of about equal length as fit into 100 columns."""
    n_parts = -(-len(rates) // _MOST_RATES)
    size = -(-len(rates) // n_parts)
    return [rates[at : at + size] for at in range(0, len(rates), size)]


def _by_rate(result: ModesFile, rates: Sequence[float], quantity: str, unit: Unit) -> Table:
    title = {"goodput": "goodput at offered rate", "attainment": "SLO attainment"}
    table = _table(title[quantity], *(f"{rate:g}/s" for rate in rates))
    for mode in result.modes:
        by_rate = {row.rate_per_s: row for row in whole(result) if row.mode == mode}
        table.add_row(
            mode,
            *(
                value_text(getattr(by_rate[rate], quantity), unit) if rate in by_rate else ""
                for rate in rates
            ),
        )
    return table


def _differences(result: ModesFile, rates: Sequence[float]) -> Table:
    table = _table(f"goodput over {result.baseline}", *(f"{rate:g}/s" for rate in rates))
    for mode in result.modes[1:]:
        by_rate = {row.rate_per_s: row for row in whole(result) if row.mode == mode}
        cells = [
            _signed(by_rate[rate].difference["goodput"]) if rate in by_rate else Text("")
            for rate in rates
        ]
        table.add_row(mode, *cells)
    return table


def _signed(estimate: EstimateSection) -> Text:
    """`+1.2 ±0.3`, bold where the paired confidence interval excludes zero."""
    value, low, high = estimate.value, estimate.low, estimate.high
    if value is None:
        return Text("–")
    text = f"{'+' if value >= 0 else '−'}{format_number(abs(value))}"
    if low is None or high is None:
        return Text(text)
    text = f"{text} ±{format_number((high - low) / 2)}"
    return Text(text, style="bold" if low > 0 or high < 0 else "")


def whole(result: ModesFile) -> list[ModeRow]:
    """The rows of all traffic together."""
    return [row for row in result.rows if not row.class_name]


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    table.add_column(first, overflow="fold", min_width=10)
    for name in others:
        table.add_column(name, justify="right", overflow="fold")
    return table
