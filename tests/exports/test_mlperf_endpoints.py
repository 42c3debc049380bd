"""The summary of a point of MLPerf Endpoints, against literals."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.exports.formats import export
from loadgen.exports.mlperf_endpoints import result_summary
from loadgen.records import Status
from tests.exports.test_vllm_bench import three_requests
from tests.runs import measured_run, with_manifest

USERS = {"arrivals": {"kind": "users", "users": 12}, "limits": {}}


def test_three_requests_by_hand():
    found = result_summary(with_manifest(three_requests(), scenario={"resolved": USERS}))
    counts = {key: found[key] for key in found if key.startswith("n_samples")}
    assert counts == {"n_samples_issued": 3, "n_samples_completed": 2, "n_samples_failed": 1}
    assert found["duration_ns"] == 1_500_000_000  # 0.1 to 1.6
    assert (found["qps"], found["tps"]) == pytest.approx((2 / 1.5, 4 / 1.5))
    assert found["ttft"]["percentiles"]["90"] == 400_000_000
    assert found["tpot"]["percentiles"]["90"] == 200_000_000  # (0.9 − 0.5) / 2; one token has none
    assert found["tpot"]["std_dev"] == 0
    latency = found["latency"]
    assert (latency["total"], latency["min"], latency["max"]) == (
        1_300_000_000,
        500_000_000,
        800_000_000,
    )
    assert latency["std_dev"] == pytest.approx(0.3e9 / 2**0.5)
    assert latency["median"] == 500_000_000
    assert found["output_sequence_lengths"]["total"] == 4
    assert found["run_config"]["load_pattern"] == {"type": "concurrency", "target_concurrency": 12}
    assert (found["state"], found["complete"]) == ("complete", True)
    json.dumps(found, allow_nan=False)


def test_a_run_without_a_successful_request_has_empty_rollups():
    run = measured_run(n_requests=30)
    run.request_rows["status"] = Status.connect_error
    found = result_summary(run)
    assert (found["ttft"], found["output_sequence_lengths"]) == ({}, {})
    assert (found["n_samples_completed"], found["qps"]) == (0, None)


def test_a_file_holds_a_point():
    with pytest.raises(UsageError, match="mlperf-endpoints holds a single run"):
        export([measured_run(), measured_run(seed=8)], "mlperf-endpoints")
