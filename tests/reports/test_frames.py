"""The tables behind the figures: exact where they are numbers, thinned where they are points."""

import numpy as np
import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import due_rows
from loadgen.measure.per_request import per_request
from loadgen.measure.summary import PERCENTILES
from loadgen.records import Run
from reports.charts import tail_position
from reports.run.embedded_rows import embedded_rows
from reports.run.frames import (
    ANSWERED,
    MAX_BINS,
    MAX_POINTS,
    SPECTRUM_METRICS,
    WITH_FAILURES,
    Frames,
    frames,
    rows_met,
)
from tests.runs import cut_off, measured_run, with_manifest


def frames_of(run: Run) -> Frames:
    return frames(run, summarize(run), per_request(run))


@pytest.mark.parametrize("metric", SPECTRUM_METRICS)
def test_a_spectrum_passes_through_the_percentiles_of_the_summary(metric: str) -> None:
    run = measured_run(620, n_failed=6, manifest={"window": {"warmup_s": 2.0, "measure_s": 60.0}})
    summary = summarize(run)
    drawn = frames(run, summary, per_request(run)).spectra[metric]
    seen = [record for record in drawn if record["clock"] == "released"]
    for series, percentiles in (
        (ANSWERED, summary.metrics[metric].percentiles),
        (WITH_FAILURES, summary.metrics[metric].with_failures),
    ):
        for key in ("p50", "p90", "p99") if series == ANSWERED else ("p50", "p90"):
            (record,) = (
                r for r in seen if r["series"] == series and r["quantile"] == PERCENTILES[key]
            )
            assert record["value"] == percentiles[key].value
            if record["high"] is not None:
                assert record["low"] == percentiles[key].low
                assert record["high"] == percentiles[key].high


def test_the_tail_axis_gives_each_nine_the_same_room() -> None:
    assert [tail_position(q) for q in (0.0, 0.9, 0.99, 0.999)] == pytest.approx([0, 1, 2, 3])


def test_a_spectrum_rises_and_stops_where_failures_begin() -> None:
    drawn = frames_of(measured_run(n_failed=20)).spectra["ttft_s"]
    seen = [record for record in drawn if record["clock"] == "released"]
    for series in (ANSWERED, WITH_FAILURES):
        values = [r["value"] for r in seen if r["series"] == series]
        assert values == sorted(values)
    assert max(r["quantile"] for r in seen if r["series"] == WITH_FAILURES) <= 0.9
    assert max(r["quantile"] for r in seen if r["series"] == ANSWERED) > 0.99


def test_the_other_clock_counts_from_the_instant_of_sending() -> None:
    run = measured_run()
    run.request_rows["sent_s"] = run.request_rows["released_s"] + 0.05
    seen = frames_of(run).spectra
    for name in ("ttft_s", "e2e_s"):
        medians = {
            r["clock"]: r["value"] for r in seen[name] if r["quantile"] == PERCENTILES["p50"]
        }
        assert medians["released"] - medians["sent"] == pytest.approx(0.05)
    assert {r["clock"] for r in seen["tpot_s"]} == {"released"}


def test_what_kept_its_promises_stands_in_the_second_it_was_asked_for() -> None:
    run = measured_run(slo=["ttft <= 150ms"])
    run.request_rows["first_token_s"][100:105] += 1.0
    kept = [r["kept"] for r in frames_of(run).seconds]
    assert kept[0] == kept[1] == 0.0, "warm-up"
    assert kept[10] <= 5.0
    assert sum(kept) == summarize(run).attainment.met


def test_a_request_that_brought_its_own_limit_is_judged_by_it() -> None:
    run = measured_run(slo=["ttft <= 1s"])
    run.schedule_rows["ttft_slo_s"][50:60] = 1e-3
    found, columns = summarize(run), per_request(run)
    kept = rows_met(run, found, columns, due_rows(run))
    assert np.flatnonzero(due_rows(run) & ~kept).tolist() == list(range(50, 60))
    assert embedded_rows(run, found, columns) is not None


def test_without_failures_there_is_one_curve() -> None:
    seen = frames_of(measured_run()).spectra["ttft_s"]
    assert {r["series"] for r in seen} == {ANSWERED}


def test_time_bins_hold_every_arrival_and_every_token() -> None:
    seen = frames_of(measured_run(n_failed=3)).seconds
    widths = [r["to_s"] - r["from_s"] for r in seen]
    for field, total in (("asked", 220), ("sent", 220), ("output_tokens", 217 * 20)):
        assert sum(r[field] * w for r, w in zip(seen, widths, strict=True)) == pytest.approx(total)


def test_a_long_run_has_no_more_bins_than_a_figure_can_show() -> None:
    window = {"warmup_s": 2.0, "measure_s": 7200.0}
    run = measured_run(300, rate_per_s=1 / 24, manifest={"window": window})
    assert len(frames_of(run).seconds) <= MAX_BINS


def test_points_are_thinned_but_the_slowest_and_the_failures_stay() -> None:
    run = measured_run(5000, rate_per_s=100.0, n_tokens=2, n_failed=40)
    seen = frames_of(run)
    ok = [p for p in seen.points if p["status"] == "ok"]
    assert len(ok) <= MAX_POINTS < seen.n_points == 4960
    assert sum(p["status"] == "http_error" for p in seen.points) == seen.n_failed_points == 40
    ttft_s = run.request_rows["first_token_s"] - run.request_rows["released_s"]
    slowest = np.sort(ttft_s[~np.isnan(ttft_s)])[-200:]
    assert set(slowest.tolist()) <= {p["ttft_s"] for p in ok}


def test_the_age_of_an_unfinished_request_is_plotted_nowhere() -> None:
    """Ten have no token, ten were cut off between two tokens; both after 10 s or more."""
    run = cut_off(measured_run(n_failed=2), slice(100, 110))
    run = cut_off(run, slice(110, 120), has_begun=True)
    drawn = frames_of(run)
    assert (drawn.n_points, drawn.n_failed_points) == (198, 2)
    assert {point["request_id"] for point in drawn.points}.isdisjoint(range(100, 120))
    assert {record["status"] for record in (*drawn.points, *drawn.itl)} == {"ok", "http_error"}
    assert max(point["ttft_s"] for point in drawn.points) < 1.0
    assert max(record["itl_s"] for record in drawn.itl) < 1.0
    assert [kind.n for kind in drawn.failures] == [2]


def test_limits_stand_where_their_percentile_is() -> None:
    seen = frames_of(measured_run(slo=["ttft <= 150ms", "p99(ttft) <= 300ms", "goodput >= 1/s"]))
    assert [(r["limit"], r["tail"]) for r in seen.limits["ttft_s"]] == [
        (0.15, None),
        (0.3, pytest.approx(2.0)),
    ]


def test_an_empty_run_has_frames_without_samples() -> None:
    seen = frames_of(with_manifest(measured_run(0), window={"warmup_s": 0.0, "measure_s": 5.0}))
    assert all(not records for records in seen.spectra.values())
    assert (len(seen.seconds), len(seen.points), len(seen.failures)) == (5, 0, 0)
