"""Figures are valid Vega-Lite and draw what they are given, checked with the library itself."""

import copy
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import vl_convert
from msgspec import structs

from loadgen.measure.aggregate import summarize
from loadgen.measure.per_request import per_request
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.records import SERVER, Run, Status
from loadgen.studies.modes.result import Leader
from loadgen.studies.modes.view import _gain, value_text
from reports.charts import time_unit
from reports.run.frames import frames
from reports.run.spectra import spectra
from reports.run.timeline import timeline
from tests.runs import measured_run

SLO = ["ttft <= 150ms", "p99(ttft) <= 300ms", "p99(itl) <= 20ms"]


def figures_of(run: Run) -> dict[str, Any]:
    seen = frames(run, summarize(run), per_request(run))
    return {**spectra(seen), "timeline": timeline(seen)}


def drawn(spec: dict[str, Any]) -> str:
    """The figure as SVG, drawn by the library at a fixed width."""
    spec = copy.deepcopy(spec)
    for panel in spec.get("vconcat", []):
        panel["width"] = 600
    if spec.get("width") == "container":
        spec["width"] = 400
    return vl_convert.vegalite_to_svg(spec)


@pytest.mark.parametrize("n_failed", [0, 5])
def test_every_figure_is_drawn(n_failed: int) -> None:
    specs = figures_of(measured_run(slo=SLO, n_failed=n_failed))
    assert len(specs) == 5
    for name, spec in specs.items():
        svg = drawn(spec)
        assert "<path" in svg, name
        assert "NaN" not in svg, name
        assert "undefined" not in svg, name


def test_a_spectrum_shows_its_limit_in_the_words_it_was_written_in() -> None:
    svg = drawn(figures_of(measured_run(slo=SLO))["spectrum-ttft"])
    assert "p99(ttft) &lt;= 300ms" in svg
    assert re.search(r">99 %<", svg)
    assert re.search(r">90 %<", svg)


def test_the_servers_queue_and_memory_stand_below_where_it_tells_them() -> None:
    run = measured_run()
    assert len(figures_of(run)["timeline"]["vconcat"]) == 6
    rows = [(t, 0, 5.0) for t in range(20)] + [(t, 1, 0.5) for t in range(20)]
    told = replace(
        run,
        server_rows=np.array(sorted(rows), SERVER),
        names=replace(run.names, series=("waiting", "kv_usage")),
    )
    spec = figures_of(told)["timeline"]
    titles = [panel["title"]["text"] for panel in spec["vconcat"][6:]]
    assert titles == ["in the server: running ▆, waiting —", "in the server: KV cache in use"]
    values = spec["datasets"]["server"]
    assert [v["waiting"] for v in values[:20]] == [5.0] * 20
    assert values[-1]["waiting"] is None, "nothing was read at the end"
    svg = drawn(spec)
    assert "NaN" not in svg
    assert "100%" in svg


def test_the_servers_gpus_stand_below_where_it_tells_them() -> None:
    run = measured_run()
    series = ("gpu_utilization", "gpu_memory_bytes", "gpu_power_w")
    readings = [(2.2, 0.5, 4e10, 300.0), (2.8, 0.7, 5e10, 500.0), (7.5, 0.1, 1e10, 80.0)]
    rows = [(t, k, value) for t, *values in readings for k, value in enumerate(values)]
    told = replace(run, server_rows=np.array(rows, SERVER), names=replace(run.names, series=series))
    spec = figures_of(told)["timeline"]
    assert [panel["title"]["text"] for panel in spec["vconcat"][6:]] == [
        "GPU: share of time a kernel ran",
        "GPU: memory used, all GPUs",
        "GPU: power drawn, all GPUs",
    ]
    second = spec["datasets"]["server"][2]
    assert second["gpu_utilization"] == pytest.approx(0.6)  # means, but the most memory
    assert (second["gpu_memory_bytes"], second["gpu_power_w"]) == (5e10, 400.0)
    assert spec["datasets"]["server"][3]["gpu_power_w"] is None
    svg = drawn(spec)
    assert "NaN" not in svg
    assert svg.count(">seconds since the start of the run<") == 2  # the first strip and the last


def test_the_timeline_marks_every_request_and_every_gap() -> None:
    run = measured_run(30, n_failed=7, n_tokens=5)
    svg = drawn(figures_of(run)["timeline"])
    assert len(re.findall(r'aria-roledescription="point"', svg)) == 30 + 23 * 4


def test_a_gap_stands_where_it_ended_and_a_break_where_it_broke() -> None:
    run = measured_run(3, n_tokens=3, ttft_s=0.1)
    rows, chunks = run.request_rows, run.chunk_rows
    chunks["received_s"] = [1.0, 1.1, 1.3, 2.0, 2.5, 2.6, 3.0, 3.1, 3.2]
    chunks["tokens"] = [1, 1, 2, 1, 1, 1, 1, 1, 1]
    rows["first_token_s"] = [1.0, 2.0, 3.0]
    rows["status"][2], rows["last_token_s"][2], rows["done_s"][2] = Status.stream_error, 3.2, 3.7
    found = frames(run, summarize(run), per_request(run))
    shown = [(p["request_id"], p["at_s"], round(p["itl_s"], 6), p["status"]) for p in found.itl]
    assert shown == [
        (0, 1.1, 0.1, "ok"), (0, 1.3, 0.1, "ok"), (1, 2.5, 0.5, "ok"), (1, 2.6, 0.1, "ok"),
        (2, 3.1, 0.1, "ok"), (2, 3.2, 0.1, "ok"), (2, 3.7, 0.5, "stream_error"),
    ]  # fmt: skip
    assert found.n_itl == 6


def test_of_many_gaps_the_longest_are_drawn() -> None:
    run = measured_run(220, n_tokens=40)
    run.chunk_rows["received_s"][4000:] += 3.0  # one stall of an answer, the 101st
    found = frames(run, summarize(run), per_request(run))
    assert found.n_itl == 220 * 39
    assert len(found.itl) <= 2500
    longest = max(found.itl, key=lambda p: p["itl_s"])
    assert longest["itl_s"] == pytest.approx(per_request(run).gaps.icl_s.max())


def test_latencies_of_seconds_are_shown_in_seconds_and_wide_tails_on_a_log_scale() -> None:
    run = measured_run(ttft_s=0.02)
    assert "(log scale)" not in drawn(figures_of(run)["spectrum-ttft"])
    run.request_rows["first_token_s"][100] += 12.0
    svg = drawn(figures_of(run)["spectrum-ttft"])
    assert "s (log scale)" in svg
    assert "ms (log scale)" not in svg


def test_a_run_without_answers_has_a_timeline_only() -> None:
    specs = figures_of(measured_run(40, n_failed=40))
    assert set(specs) == {"timeline"}
    assert "<path" in drawn(specs["timeline"])
    assert drawn(figures_of(measured_run(0))["timeline"])


def test_a_figure_shows_seconds_from_ten_seconds_on():
    assert time_unit(10.0) == ("s", 1.0)
    assert time_unit(9.99) == ("ms", 1000.0)


def test_a_value_over_seeds_is_shown_with_half_the_width_of_its_interval():
    estimate = EstimateSection(value=0.431, low=0.419, high=0.443, n=3)
    assert value_text(estimate, "s") == "431 ms ±12"
    assert value_text(structs.replace(estimate, n=1), "s") == "431 ms"


def test_a_gain_may_be_chance_if_its_interval_contains_zero():
    def gain(low, high):
        gap = EstimateSection(value=2.0, low=low, high=high, n=3)
        return _gain([Leader(rate_per_s=4.0, best="b", runner_up="a", difference=gap)], 4.0)

    assert gain(1.0, 3.0) == "; +2/s over the runner-up a [+1, +3]"
    assert gain(-1.0, 5.0) == "; +2/s over the runner-up a [-1, +5], may be chance"


def test_a_strip_of_the_server_that_stays_at_zero_is_left_out() -> None:
    run = measured_run()
    rows = [(t, 0, 0.0) for t in range(20)] + [(t, 1, 0.006) for t in range(20)]
    names = replace(run.names, series=("waiting", "kv_usage"))
    idle = replace(run, server_rows=np.array(sorted(rows), SERVER), names=names)
    assert len(figures_of(idle)["timeline"]["vconcat"]) == 6
