"""Figures are valid Vega-Lite and draw what they are given, checked with the library itself."""

import copy
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import vl_convert

from loadgen.measure.aggregate import summarize
from loadgen.measure.per_request import per_request
from loadgen.records import SERVER, Run
from reports.charts import spectra
from reports.frames import frames
from reports.timeline import timeline
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
    assert titles == ["in the server: running, waiting", "in the server: KV cache in use"]
    values = spec["datasets"]["server"]
    assert [v["waiting"] for v in values[:20]] == [5.0] * 20
    assert values[-1]["waiting"] is None, "nothing was read at the end"
    svg = drawn(spec)
    assert "NaN" not in svg
    assert "100%" in svg


def test_the_timeline_marks_as_many_points_as_there_are_requests() -> None:
    svg = drawn(figures_of(measured_run(n_failed=7))["timeline"])
    assert len(re.findall(r'aria-roledescription="point"', svg)) == 220 + 213  # and gaps


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
