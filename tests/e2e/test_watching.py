"""Runs that others read while they go on, against the scripted mock server."""

import json
import re
from typing import Any

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.live.live_series import SERIES
from loadgen.measure.per_request import per_request
from tests.e2e.test_run import flags, start
from tests.live.test_watched import scraped

pytestmark = pytest.mark.e2e


def test_prometheus_reads_a_run_while_it_goes_on(cli, tmp_path):
    process = start(
        cli, "run", "--target=mock", "--engine=ttft=20ms,itl=5ms", *flags(seconds="3s"),
        "--slo=ttft<=30s", *cli.lenient, "--metrics-port=0", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    try:
        words = ""
        while not (found := re.search(r"metrics: (\S+)", words)):
            words = process.stderr.readline()
            assert words, "it ended without saying where its metrics are"
        sample: dict[str, dict[Any, float]] = {}
        while sample.get("slobench_requests_total", {}).get(OK, 0) < 20:
            assert process.poll() is None, "it ended before twenty answers were seen"
            sample = scraped(found[1])
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, stderr
    of_class = (("class", "default"),)
    n = sample["slobench_requests_total"][OK]
    assert sample["slobench_ttft_seconds_count"][of_class] == n
    assert sample["slobench_slo_met_total"][of_class] == n
    # Events that one read delivers have no gap between them: on a busy machine there are fewer.
    assert n <= sample["slobench_itl_seconds_count"][of_class] <= 15 * n
    assert 0.02 * n <= sample["slobench_ttft_seconds_sum"][of_class] < 5 * n
    assert sample["slobench_sent_total"][()] >= n
    assert sample["slobench_asked_rate_per_second"][()] == pytest.approx(40, rel=0.5)
    assert {name.partition("_bucket")[0] for name in sample} >= set(SERIES) - HISTOGRAMS


OK = (("class", "default"), ("status", "ok"))
HISTOGRAMS = {name for name, one in SERIES.items() if one.kind == "histogram"}


def test_a_collector_is_told_what_the_rows_say(cli, tmp_path):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra `otel`")
    from tests.live.test_otlp import Collector, attributes, metrics

    with Collector() as collector:
        result = cli(
            "run", "--target=mock", "--engine=ttft=20ms,itl=5ms", *flags(),
            *cli.lenient, f"--otlp={collector.url}", "--out=run", cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    told, run = metrics(collector.received[-1][1]), read_run(tmp_path / "run")
    columns, n = per_request(run), len(run.request_rows)

    def histogram(name):
        (point,) = told[name].histogram.data_points
        return point.count, point.sum

    assert histogram("slobench.ttft") == (n, pytest.approx(columns.ttft_s.sum(), rel=1e-4))
    first_chunk = histogram("gen_ai.client.operation.time_to_first_chunk")
    assert first_chunk == (n, pytest.approx(columns.ttft_from_send_s.sum(), rel=1e-4))
    assert histogram("slobench.e2e") == (n, pytest.approx(columns.e2e_s.sum(), rel=1e-4))
    tpot_s = columns.tpot_s[np.isfinite(columns.tpot_s)]  # none of an answer in one read
    assert histogram("slobench.tpot") == (len(tpot_s), pytest.approx(tpot_s.sum(), rel=1e-3))
    n_gaps, gaps_s = histogram("gen_ai.client.operation.time_per_output_chunk")
    icl_s = columns.gaps.icl_s  # without gaps inside of a read, which a busy machine makes
    assert gaps_s == pytest.approx(icl_s.sum(), rel=1e-4)
    assert len(icl_s) <= n_gaps <= 15 * n
    (ok,) = (p for p in told["slobench.requests"].sum.data_points if p.as_double)
    assert (attributes(ok)["slobench.status"], ok.as_double) == ("ok", n)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["counts"]["due"] == n


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--otlp=localhost:4318"], "--otlp localhost:4318: expected an address such as"),
        (["--metrics-port=0", "--target=sim"], "the simulator runs in virtual time"),
        (["--metrics-port=0", "--metrics-host=192.0.2.1"], "cannot listen on 192.0.2.1:0"),
    ],
)
def test_what_cannot_be_watched_is_a_line_and_exit_code_2(cli, tmp_path, words, message):
    result = cli("run", "--target=mock", *flags(seconds="1s"), *words, cwd=tmp_path)
    assert result.returncode == 2
    assert message in result.stderr
