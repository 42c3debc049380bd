"""The whole endings of studies as they stand on the terminal: known answers, reviewed as text."""

import math
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from loadgen.measure.measures import Measured
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.compare import view as compare_view
from loadgen.studies.compare.comparable import ConfigDifference
from loadgen.studies.compare.judgement import ComparedMeasure, Options
from loadgen.studies.compare.numbers import judge_sides
from loadgen.studies.modes import capacity_view
from loadgen.studies.modes import view as modes_view
from loadgen.studies.modes.result import (
    CellNumbers,
    Leader,
    ModeCapacitiesFile,
    ModeCell,
    ModeRow,
    ModesFile,
)
from loadgen.studies.modes.seed_capacity import CapacityRatio, ModeCapacities, ModeCapacity
from loadgen.studies.nightly import view as nightly_view
from loadgen.studies.nightly.result import CellResult, NightResult
from loadgen.studies.sweep import view as sweep_view
from loadgen.studies.sweep.result import AxisSection, CellRow, SweepResult
from reports.ending import text
from tests.runs import measured_run


def number(value, n=2):
    return EstimateSection(value=value, low=None, high=None, n=n)


def cell(rate, verdicts, goodput, p99_s):
    return CellRow(
        cell=f"rate={rate:g}_s",
        factors={"arrivals.rate": f"{rate:g}/s"},
        series="",
        along=rate,
        n=sum(verdicts.values()),
        n_due=100,
        gpus=1,
        gpus_are_declared=True,
        offered_rate_per_s=number(rate),
        verdicts=verdicts,
        n_untrusted=0,
        benefit=number(20 * goodput),
        cost=number(p99_s),
        cost_is_infinite=p99_s is None,
        measures={"goodput": number(goodput)},
        runs=[],
        failures=[],
    )


def sweep(*rows, n_untrusted=0):
    n = sum(row.n for row in rows)
    return SweepResult(
        slobench="1", command=["slobench"], scenario="chat", scenario_text="",
        slo=["ttft <= 1s"], targets=["http://h"],
        axes=[AxisSection(key="arrivals.rate", values=[])], how="grid", along="arrivals.rate",
        cost="p99(ttft)", cost_unit="s", benefit="output_tokens_per_s", repeats=2,
        confidence=0.95, order_seed=0, n_runs=n, n_done=n, n_failed=0, n_untrusted=n_untrusted,
        rows=list(rows),
    )  # fmt: skip


RATES = (
    cell(4, {"met": 2}, 3.9, 0.0098),
    cell(8, {"met": 2}, 7.8, 0.041),
    cell(16, {"met": 1, "missed": 1}, 12.1, 0.93),
    cell(32, {"missed": 2}, 11.7, None),
)


def test_a_sweep_ends_with_these_lines():
    assert text(sweep_view.ending(sweep(*RATES))) + "\n" == (
        """\
between 8 and 16 req/s; promise 8
  ✓ rate 4/s   met: goodput 3.9/s, p99(ttft) 9.8 ms, 78 tokens/s per GPU
  ✓ rate 8/s   met: goodput 7.8/s, p99(ttft) 41 ms, 156 tokens/s per GPU
  ? rate 16/s  1 met, 1 missed: goodput 12.1/s, p99(ttft) 930 ms, 242 tokens/s per GPU
  ✗ rate 32/s  missed: goodput 11.7/s, p99(ttft) ∞, 234 tokens/s per GPU
  sweep      chat against http://h: arrivals.rate varied, 2 runs a cell
  found      Most goodput of the loads that met the SLO: 7.8 requests/s.
  next       find the highest rate between them: slobench capacity with the same target, traffic and
             SLO, --between 8/s:32/s
"""
    )


def test_a_sweep_without_a_miss_leads_to_higher_rates():
    ending = sweep_view.ending(sweep(*RATES[:2]))
    assert text(ending).splitlines()[-1] == (
        "  next       every rate met the SLO: sweep higher rates, above 8/s"
    )


def test_a_sweep_that_ends_at_the_edge_leads_to_higher_rates():
    """A search between a rate that is met and one that is met at times may find no miss."""
    ending = sweep_view.ending(sweep(*RATES[:3]))
    assert text(ending).splitlines()[-1] == (
        "  next       16/s is met and missed: sweep higher rates, too, above 16/s"
    )


def test_a_sweep_without_a_kept_slo_leads_to_lower_rates():
    ending = sweep_view.ending(sweep(RATES[3]))
    assert text(ending).splitlines()[-1] == (
        "  next       no rate met the SLO: sweep lower rates, below 32/s"
    )


def test_a_sweep_that_cannot_be_trusted_begins_with_that():
    lines = text(sweep_view.ending(sweep(*RATES, n_untrusted=3))).splitlines()
    assert lines[0] == (
        "NOT TO BE TRUSTED: 3 of 8 runs are INVALID; between 8 and 16 req/s; promise 8"
    )
    assert lines[7] == "  note       3 runs cannot be trusted; see their reports"


def test_a_large_sweep_shows_its_best_cells():
    rows = [cell(k, {"met": 2} if k < 9 else {"missed": 2}, float(k), 0.01) for k in range(1, 13)]
    lines = text(sweep_view.ending(sweep(*rows))).splitlines()
    assert [line.split()[2] for line in lines[1:6]] == ["4/s", "5/s", "6/s", "7/s", "8/s"]
    assert lines[6] == "  + 7 more cells: --full"


def mode(name, goodput, ttft_s, tpot_s):
    of_time = dict.fromkeys(
        ("ttft_p50", "tpot_p50", "itl_p50", "itl_p99", "max_stall_p50", "max_stall_p99",
         "e2e_p50", "e2e_p99"), number(0.01),
    )  # fmt: skip
    return ModeRow(
        goodput=number(goodput), attainment=number(0.995), output_tokens_per_s=number(92.8),
        ttft_p99=number(ttft_s), tpot_p99=number(tpot_s), mode=name, rate_per_s=None,
        class_name="", n_seeds=2, n_due=74, offered_rate_per_s=4.0, difference={}, ratio={},
        waits_s={}, **of_time,
    )  # fmt: skip


HEAD: dict[str, Any] = {
    "slobench": "1", "command": ["slobench"], "scenario": "chat", "scenario_text": "",
    "slo": ["ttft <= 1s"], "target": "sim", "settings": {}, "modes": ["chunked", "static"],
    "seeds": [3, 4], "confidence": 0.95, "n_untrusted": 0,
}  # fmt: skip


def test_a_comparison_of_modes_ends_with_these_lines():
    gap = EstimateSection(value=0.6, low=0.2, high=1.0, n=2)
    result = ModesFile(
        **HEAD, n_done=4, baseline="chunked", rates_per_s=None, n_cells=4,
        rows=[mode("chunked", 3.7, 0.0106, 0.00457), mode("static", 3.1, 0.443, None)],
        leaders=[Leader(rate_per_s=None, best="chunked", runner_up="static", difference=gap)],
        cells=[],
    )  # fmt: skip
    assert text(modes_view.ending(result)) + "\n" == (
        """\
BEST: chunked, goodput 3.7/s (99.5 % of requests met the SLO); +0.6/s over the runner-up static
  [+0.2, +1]
    chunked  goodput 3.7/s, SLO met 99.5 %, TTFT p99 10.6 ms, TPOT p99 4.57 ms
    static   goodput 3.1/s, SLO met 99.5 %, TTFT p99 443 ms
  compared   chat, simulated, seeds 3-4
  note       simulated (cost model): good for ranking, not for absolute numbers
  next       find the highest rate of each mode that meets the SLO: add --capacity
"""
    )


def mode_cell(name, seed, verdict):
    bounded = {key: {"value": 1.0} for key in CellNumbers.__struct_fields__ if key[0] != "n"}
    del bounded["offered_rate_per_s"]
    facts = {
        "n_due": 74, "n_ok": 74, "offered_rate_per_s": 4.0, "mode": name, "rate_per_s": None,
        "seed": seed, "schedule_sha256": "", "ended": "planned", "verdict": verdict,
        "is_trusted": True, "reasons": [], "classes": {}, "waits_s": {},
    }  # fmt: skip
    return msgspec.convert({**bounded, **facts}, ModeCell)


def test_modes_of_which_some_missed_the_slo_begin_with_that():
    """Goodput without a limit per request counts all answers: equal goodput is no equal result."""
    same = EstimateSection(value=0.0, low=0.0, high=0.0, n=2)
    cells = [mode_cell("chunked", k, "met") for k in (3, 4)]
    cells += [mode_cell("static", k, "missed") for k in (3, 4)]
    result = ModesFile(
        **HEAD, n_done=4, baseline="chunked", rates_per_s=None, n_cells=4, cells=cells,
        rows=[mode("chunked", 3.7, 0.0106, 0.00457), mode("static", 3.7, 0.443, None)],
        leaders=[Leader(rate_per_s=None, best="chunked", runner_up="static", difference=same)],
    )  # fmt: skip
    lines = text(modes_view.ending(result)).splitlines()
    assert lines[:3] == [
        "MET: chunked; missed by static",
        "  ✓ chunked  goodput 3.7/s, SLO met 99.5 %, TTFT p99 10.6 ms, TPOT p99 4.57 ms",
        "  ✗ static   goodput 3.7/s, SLO met 99.5 %, TTFT p99 443 ms",
    ]
    assert lines[3].startswith("  goodput    equal: chunked and static, goodput 3.7/s")
    mixed = structs.replace(result, cells=[*cells, mode_cell("static", 5, "met")])
    assert text(modes_view.ending(mixed)).startswith("EQUAL: chunked and static")


def test_the_capacities_of_modes_end_with_these_lines():
    def estimate(value, low, high):
        return {"value": value, "low": low, "high": high, "n": 2}

    result = ModeCapacitiesFile(
        **HEAD, n_done=4, attainment=0.99, requests=None, was_interrupted=False, n_searches=4,
        n_runs=40, searches=[],
        capacity=ModeCapacities(
            modes=[ModeCapacity(mode="chunked", **estimate(66.2, 64.0, 68.4)),
                   ModeCapacity(mode="static", **estimate(21.5, 20.9, 22.1))],
            ratios=[CapacityRatio(best="chunked", mode="static", **estimate(3.08, 2.9, 3.27))],
        ),
    )  # fmt: skip
    assert text(capacity_view.ending(result)) + "\n" == (
        """\
BEST: chunked has the highest capacity: 66.2 req/s [64, 68.4], the highest rate at which 99 % of the
  requests meet the SLO
    chunked  66.2 req/s, between 64 and 68.4
    static   21.5 req/s, between 20.9 and 22.1, best / mode 3.08 (2.9 to 3.27)
  compared   chat, simulated, seeds 3-4
  note       simulated (cost model): good for ranking, not for absolute numbers
"""
    )


def sides(itl_s):
    return [Measured(measured_run(seed=k, itl_s=itl_s)) for k in range(3)]


def test_a_comparison_ends_with_these_lines():
    comparison = judge_sides(sides(0.01), sides(0.013), Options(metrics=["mean(tpot)"]))
    assert text(compare_view.ending(comparison)) + "\n" == (
        """\
WORSE: B is worse than A.
  ▼ mean(tpot)  10.2 ms → 13.3 ms, +30 % [+30, +30]
  sides      A: 3 runs, B: 3 runs, all with one schedule; 95% confidence per bound
  changed    no recorded setting
  note       Attainment is n/a: no per-request limit.
  next       no recorded setting differs between A and B: check the machine, and changes to the
             server that its labels do not record
"""
    )


def measure(verdict, change, low, high):
    return ComparedMeasure(
        measure="p99(ttft)", unit="s", is_gated=True, verdict=verdict, a=0.04,
        b=0.04 * (1 + change), change=change, low=low, high=high, margin=0.1,
        p=0.001, p_adjusted=0.001, p_same=1.0,
        noise=0.02, df=4.0, effect_size=8.0, runs_needed=3, smallest_found=0.08,
        smallest_same=0.1, effect=0.1, n_runs=(2, 2), n_due=(100, 100), how="runs",
    )  # fmt: skip


def test_a_measured_comparison_leads_to_its_page():
    comparison = structs.replace(
        judge_sides(sides(0.01), sides(0.013), Options(metrics=["mean(tpot)"])),
        changes=(ConfigDifference("target.policy.kind", "chunked", "static"),),
    )
    for has_page, words in (
        (False, "See the distributions of both sides: add --html compare.html"),
        (True, "See the distributions of both sides: open the page"),
    ):
        step = compare_view.ending(comparison, has_page=has_page).next
        assert step is not None
        assert step.text == words


def test_a_side_without_a_value_is_named():
    absent = replace(measure("inconclusive", math.nan, None, None), b=math.nan)
    assert compare_view.ending_row(absent).value == "40 ms → –: no value in B"
    assert compare_view.ending_row(replace(absent, a=math.nan)).value == (
        "– → –: no value in A and B"
    )


def night_cell(name, verdict, *measures, n=9):
    return CellResult(
        cell=name, verdict=verdict, measures=measures, noise={}, n_nights=n, changes=(), notes=(),
        factors={}, key="", agrees={}, control=None, runs=(), trends={},
    )  # fmt: skip


def test_a_night_ends_with_these_lines():
    cells = (
        night_cell("chat", "same", measure("same", 0.01, -0.02, 0.04)),
        night_cell("rag", "worse", measure("worse", 0.3, 0.22, 0.38)),
        night_cell("new", "baseline", n=0),
    )
    night = NightResult(
        night="n", started_utc="", verdict="worse", exit_code=1, fail_on="worse", confidence=0.95,
        window=14, repeats=2, file="nightly.yaml", baseline="base", directory="runs/n", link="",
        command=[], cells=cells,
    )  # fmt: skip
    assert text(nightly_view.ending(night)) + "\n" == (
        """\
WORSE: At least one measure got worse.
  ▼ rag   worse: p99(ttft) 40 ms → 52 ms, +30 % [+22, +38]
  = chat  same, against 9 nights
    new   baseline started, no comparison
  next       tonight is not added to the baseline. To accept the new level: slobench nightly
             nightly.yaml --accept
"""
    )
    quiet = structs.replace(night, verdict="same", cells=cells[:1])
    assert text(nightly_view.ending(quiet)).splitlines()[0] == (
        "SAME: The same as the nights before, within the margins."
    )
