"""llm-d's benchmark report and InferenceX's rows, against literals."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.exports.formats import export
from loadgen.exports.inferencex import inferencex_row
from loadgen.exports.llm_d import llm_d_report
from loadgen.manifest.sections import LabelsSection
from loadgen.records import Status
from tests.exports.test_vllm_bench import three_requests
from tests.runs import changed, measured_run, with_manifest

POISSON = {"arrivals": {"kind": "poisson", "rate": "12/s"}, "limits": {}}
USERS = {"arrivals": {"kind": "users", "users": 12}, "limits": {}}
LABELS = LabelsSection(gpu="H100", gpus=2, engine="vllm", version="0.33.0", flags="--x")


def labelled(run, resolved):
    target = changed(run.manifest.target, labels=LABELS)
    return with_manifest(run, target=target, scenario={"resolved": resolved})


def aggregate(run):
    return llm_d_report(run)["results"]["request_performance"]["aggregate"]


def test_three_requests_by_hand():
    found = aggregate(labelled(three_requests(), POISSON))
    ttft = found["latency"]["time_to_first_token"]
    assert ttft["units"] == "s"
    assert (ttft["mean"], ttft["p0p1"], ttft["p99p9"]) == pytest.approx((0.5, 0.5, 0.5))
    tpot, itl = (found["latency"][key] for key in ("time_per_output_token", "inter_token_latency"))
    assert (tpot["units"], tpot["mean"]) == ("s/token", pytest.approx(0.15))
    assert (itl["min"], itl["max"], itl["stddev"]) == pytest.approx((0.1, 0.2, 0.05))
    assert found["latency"]["request_latency"]["p50"] == pytest.approx(0.5)  # of 0.5 and 0.8
    assert found["requests"]["total"] == 3
    assert (found["requests"]["failures"], found["requests"]["incomplete"]) == (1, 0)
    assert found["requests"]["output_length"]["mean"] == 2
    assert found["throughput"]["request_rate"] == {
        "units": "queries/s",
        "mean": pytest.approx(2 / 3),
    }


def test_the_load_and_the_server_are_those_of_the_manifest():
    report = llm_d_report(labelled(three_requests(), POISSON))
    assert report["version"] == "0.2.1"
    assert report["run"]["time"] == {
        "start": "2026-01-05T10:00:00+00:00",
        "end": "2026-01-05T10:00:03+00:00",
        "duration": "PT3.000000S",
    }
    assert report["scenario"]["stack"][0]["standardized"] == {
        "kind": "generic",
        "tool": "vllm",
        "tool_version": "0.33.0",
        "model": {"name": "tiny-llama"},
        "accelerator": {"model": "H100", "count": 2},
    }
    load = report["scenario"]["load"]["standardized"]
    assert (load["tool"], load["source"], load["rate_qps"]) == ("slobench", "random", 12.0)
    assert load["input_seq_len"] == {"distribution": "fixed", "value": 100}
    loop = llm_d_report(labelled(three_requests(), USERS))["scenario"]["load"]["standardized"]
    assert loop["concurrency"] == 12
    assert "rate_qps" not in loop


def test_a_run_without_a_successful_request_has_no_latency():
    run = measured_run(n_requests=30)
    run.request_rows["status"] = Status.connect_error
    found = aggregate(run)
    assert found["latency"] == {}
    assert found["requests"] == {"total": 10, "failures": 10, "incomplete": 0}
    json.dumps(found, allow_nan=False)


def test_a_row_of_inferencex_has_seconds_and_throughput_per_gpu():
    row = inferencex_row(labelled(three_requests(), USERS))
    assert (row["hw"], row["framework"], row["model"]) == ("H100", "vllm", "tiny-llama")
    assert (row["conc"], row["isl"], row["osl"]) == (12, 100, 3)
    assert row["mean_ttft"] == pytest.approx(0.3)
    assert row["p99_ttft"] == pytest.approx(0.398)
    assert row["median_tpot"] == pytest.approx(0.25)
    assert row["median_intvty"] == pytest.approx(4)  # tokens/s of a user
    assert row["std_intvty"] is None  # of a standard deviation of 0
    assert row["output_tput_per_gpu"] == pytest.approx(4 / 2.5 / 2)
    assert row["tput_per_gpu"] == pytest.approx((150 + 4) / 2.5 / 2)
    assert row["input_tput_per_gpu"] == pytest.approx(150 / 2.5 / 2)


def test_runs_share_a_file_of_inferencex_and_unknown_gpus_stay_unknown():
    rows = json.loads(export([measured_run(), measured_run(seed=8)], "inferencex"))
    assert len(rows) == 2
    assert rows[0]["tput_per_gpu"] is None
    with pytest.raises(UsageError, match="llm-d holds a single run"):
        export([measured_run(), measured_run(seed=8)], "llm-d")
