"""Metrics of the GenAI conventions in OTLP/JSON, against literals."""

import json

import pytest

from loadgen.exports.formats import export
from loadgen.exports.otlp_json import otlp_json
from loadgen.records import Status
from tests.exports.test_vllm_bench import three_requests
from tests.runs import measured_run


def points(run):
    """Data points by metric."""
    (resource,) = otlp_json(run)["resourceMetrics"]
    (scope,) = resource["scopeMetrics"]
    return {metric["name"]: metric["histogram"]["dataPoints"] for metric in scope["metrics"]}


def attributes(point):
    return {a["key"]: next(iter(a["value"].values())) for a in point["attributes"]}


def test_three_requests_by_hand():
    found = points(three_requests())
    (first,) = found["gen_ai.client.operation.time_to_first_chunk"]
    assert (first["count"], first["sum"]) == ("2", pytest.approx(0.8))  # 0.4 and 0.4
    assert first["bucketCounts"][8:11] == ["0", "2", "0"]  # (0.25, 0.5]
    assert len(first["bucketCounts"]) == len(first["explicitBounds"]) + 1
    (between,) = found["gen_ai.client.operation.time_per_output_chunk"]
    assert (between["count"], between["min"], between["max"]) == (
        "2",
        pytest.approx(0.1),
        pytest.approx(0.2),
    )
    ok, failed = found["gen_ai.client.operation.duration"]
    assert (ok["count"], ok["sum"]) == ("2", pytest.approx(0.8 + 0.5))
    assert (failed["count"], failed["sum"]) == ("1", pytest.approx(0.4))
    assert attributes(failed)["error.type"] == "http_error"
    usage = {attributes(p)["gen_ai.token.type"]: p["sum"] for p in
             found["gen_ai.client.token.usage"]}  # fmt: skip
    assert usage == {"input": 150, "output": 4}


def test_a_point_has_the_attributes_of_the_conventions_and_the_window():
    (point,) = points(three_requests())["gen_ai.client.operation.time_to_first_chunk"]
    assert attributes(point) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "tiny-llama",
        "server.address": "127.0.0.1",
        "server.port": "8000",
    }
    assert point["startTimeUnixNano"] == "1767607200000000000"
    assert point["timeUnixNano"] == "1767607203000000000"


def test_a_value_on_a_bound_is_in_the_bucket_below_it():
    run = measured_run(n_tokens=16)
    (_, output) = points(run)["gen_ai.client.token.usage"]
    assert output["bucketCounts"][:4] == ["0", "0", "200", "0"]  # (4, 16]


def test_runs_take_a_line_each_and_metrics_without_a_value_have_no_point():
    run = measured_run(n_requests=30)
    run.request_rows["status"] = Status.connect_error
    lines = export([run, measured_run()], "otlp-json").splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == otlp_json(run)
    assert points(run)["gen_ai.client.token.usage"] == []
