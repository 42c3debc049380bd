"""Servers that answer quickly and wrongly under load: none of them is ever MET."""

import asyncio
from dataclasses import replace

import pytest
from rich.console import Console

from loadgen.measure.aggregate import summarize
from loadgen.run.execute import record
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.run.target import open_target
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from targets.canary import record_idle
from tests.e2e.sick import PATIENTS, Sick

pytestmark = pytest.mark.e2e
LENIENT = {
    **dict.fromkeys(("lateness", "loop_lag", "read_backlog"), "60s"),
    **dict.fromkeys(("cpu", "run_delay"), "100%"),
}
NEEDS_CANARIES = (
    "swapped_model", "garbage", "loops", "other_prompt", "shuffled", "a_quarter_swapped",
)  # fmt: skip


def setup_of(url, directory, slo=("ttft <= 60s",), canary=0.0, rate="60/s", measure="800ms"):
    scenario = Scenario.model_validate(
        {
            "name": "sick",
            "arrivals": {"kind": "constant", "rate": rate},
            "requests": {"input_tokens": 40, "output_tokens": 48},
            "phases": {"measure": measure, "drain": "4s"},
            "instrument": LENIENT,
            "stop_when": "never",
            "slo": list(slo),
        }
    )
    options = RunOptions(n_workers=1, canary=canary, scrape=False)
    return RunSetup(scenario, make_plan(scenario), url, options, directory, Console(quiet=True))


@pytest.fixture(scope="module")
def server():
    with Sick() as server:
        yield server


@pytest.fixture(scope="module")
def target(server, tmp_path_factory):
    with open_target(setup_of(server.url, tmp_path_factory.mktemp("preflight"))) as target:
        yield target


def judged(server, target, patient, directory):
    server.becomes(patient)
    return summarize(record(setup_of(server.url, directory), target))


def test_the_healthy_server_is_met(server, target, tmp_path):
    summary = judged(server, target, "", tmp_path)
    assert (summary.verdict, summary.canaries) == ("met", "")


@pytest.mark.parametrize("patient", [name for name in PATIENTS if name not in NEEDS_CANARIES])
def test_a_sick_server_is_not_met(patient, server, target, tmp_path):
    summary = judged(server, target, patient, tmp_path)
    assert summary.counts["due"] > 0
    assert summary.verdict != "met", summary.findings


def with_canaries(server, target, patient, directory):
    """A run of 144 requests, with at most 5 canaries a second."""
    server.becomes(patient)
    setup = setup_of(server.url, directory, canary=0.5, measure="2400ms")
    canaries = asyncio.run(record_idle(target.endpoint, target.adapter, 0.5, 30.0))
    return record(setup, replace(target, canaries=canaries))


def test_the_healthy_server_has_the_answers_of_idle(server, tmp_path):
    server.becomes("")
    slos = ["ttft <= 60s", "canary_match >= 99%"]
    setup = setup_of(server.url, tmp_path, slos, canary=0.5, measure="2400ms")
    with open_target(setup) as target:
        run = record(setup, target)
    summary, canary = summarize(run), run.manifest.canary
    assert canary is not None
    assert canary.idle == {"same": 32}
    assert set(canary.loaded) == {"same"}
    assert canary.loaded["same"] >= 5
    assert summary.verdict == "met"
    n = canary.loaded["same"]
    assert summary.canaries == f"{n} of {n} as at idle (repeats at idle: 32 of 32)"
    assert [line.ok for line in run.manifest.preflight if line.check == "canary"] == [True]
    (match,) = (slo for slo in summary.slo if slo.metric == "canary_match")
    assert (match.value, match.met, match.n) == (1.0, True, n)


@pytest.mark.parametrize("patient", NEEDS_CANARIES)
def test_wrong_answers_are_found_by_canaries(patient, server, target, tmp_path):
    run = with_canaries(server, target, patient, tmp_path)
    wrong, strict = summarize(run), summarize(run, ["ttft <= 60s", "canary_match >= 99%"])
    assert sum(run.manifest.canary.loaded.values()) >= 5
    assert strict.verdict == "missed"
    if patient == "a_quarter_swapped":  # too few canaries for a finding
        return
    assert (wrong.verdict, wrong.reason_kinds) == ("no_verdict", ("wrong_answers",))
    assert "canaries were answered otherwise under load than at idle" in wrong.reasons[0]
