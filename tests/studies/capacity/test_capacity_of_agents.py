"""Capacity over agents: its load, what its probes count, and a search whose answer is known."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import UsageError
from loadgen.lab.simulate import simulate
from loadgen.measure.aggregate import summarize
from loadgen.run.execute import FinishedRun
from loadgen.studies.capacity.next_probe import NextProbe, next_probe
from loadgen.studies.capacity.observed import probe_of
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.workload.scaling import offered_load, scaled
from loadgen.workload.scenario import Scenario
from tests.measure.agent_runs import BROKEN, FANNED_OUT, LINEAR, UNFINISHED, agent_run
from tests.workload.weka_files import asked, conversation, fanned_out, written

LANES = {"kind": "users", "users": 3, "think": "0s"}
PER_MINUTE = {"kind": "poisson", "rate": "6/min"}
PLANNED = NextProbe(3.0, 0.0, 30.0)


@pytest.fixture
def corpus(tmp_path):
    return written(
        tmp_path / "agents.jsonl", fanned_out(), conversation(asked(0, [1]), asked(5, [1, 2]))
    )


def scenario(corpus, arrivals, **keys):
    values = {
        "name": "agents",
        "arrivals": arrivals,
        "agents": {"path": str(corpus)},
        "phases": {"warmup": "10s", "measure": "60s"},
        "slo": ["ttft <= 1s", "attainment >= 90%"],
        **keys,
    }
    return Scenario.model_validate(values)


@pytest.mark.parametrize(
    ("arrivals", "unit", "level", "changed"),
    [
        (LANES, "agents", 3.0, {"users": 7}),
        (PER_MINUTE, "agents/min", 6.0, {"rate": 7 / 60}),
    ],
)
def test_the_load_is_live_agents_or_agents_per_minute(corpus, arrivals, unit, level, changed):
    load = offered_load(scenario(corpus, arrivals), "agents")
    assert load.unit == unit
    assert load.level == pytest.approx(level)
    found = scaled(scenario(corpus, arrivals), 7.0, "agents").arrivals
    assert {key: getattr(found, key) for key in changed} == pytest.approx(changed)


def test_other_traffic_than_agents_is_refused(corpus):
    plain = {"requests": {"input_tokens": 5, "output_tokens": 5}, "weight": 1}
    agents = {"agents": {"path": str(corpus)}, "weight": 1}
    mixed = scenario(corpus, PER_MINUTE, agents=None, classes={"chat": plain, "coders": agents})
    with pytest.raises(UsageError, match="counts agents, and chat has requests of another kind"):
        offered_load(mixed, "agents")


def test_trees_are_searched_over_agents_only(corpus):
    slo = ["ttft <= 1s", "attainment >= 99%", "attainment(tree) >= 80%"]
    spec = CapacitySpec(scenario(corpus, PER_MINUTE, slo=slo), "sim", over="agents")
    found = question_of(spec)
    assert (spec.counted, found.target) == ("trees", 0.8)
    assert found.start == pytest.approx(6.0)
    with pytest.raises(UsageError, match="use --over agents"):
        question_of(CapacitySpec(spec.scenario, "sim"))


def test_a_first_probe_is_as_long_as_its_requests_or_trees_take(corpus):
    """Trees of 6 and 2 requests, 6 a minute: 24 requests a minute; 200 of them, or 40 trees."""
    requests = next_probe(question_of(_over_agents(corpus, ["ttft <= 1s"], "90%")), [])
    trees = next_probe(
        question_of(_over_agents(corpus, ["ttft <= 1s", "attainment(tree) >= 90%"])), []
    )
    assert requests is not None
    assert trees is not None
    assert requests.measure_s == pytest.approx(200 / 24 * 60)
    assert trees.measure_s == pytest.approx(40 / 6 * 60)


def _over_agents(corpus, slo, attainment=None):
    share = None if attainment is None else float(attainment.rstrip("%")) / 100
    return CapacitySpec(
        scenario(corpus, PER_MINUTE, slo=slo), "sim", over="agents", attainment=share
    )


def test_a_probe_of_live_agents_is_at_least_as_long_as_the_scenario(corpus):
    spec = CapacitySpec(scenario(corpus, LANES), "sim", over="agents")
    assert (question_of(spec).measure_s, question_of(spec).is_integer) == (60.0, True)
    planned = next_probe(question_of(spec), [])
    assert planned is not None
    assert planned.measure_s == 60.0


@pytest.mark.parametrize(
    ("slo", "n_met"),
    [(["ttft <= 1s"], 2), (["ttft <= 1s", "task_time <= 10s"], 1), (["ttft <= 50ms"], 0)],
)
def test_a_probe_counts_trees_that_met_or_missed(slo, n_met):
    """Two trees end, of 12 and 6 s, one breaks, and one goes on for 10 s until the run ends."""
    texts = [*slo, "attainment(tree) >= 90%"]
    run = agent_run(FANNED_OUT, LINEAR, UNFINISHED, BROKEN, window=(0.0, 30.0), slo=texts)
    finished = FinishedRun(run, summarize(run), Path())
    found = probe_of(finished, PLANNED, "measured", 30.0, 0.9, "01", "agents", "trees")
    n_open = 0 if slo == ["ttft <= 50ms"] else 1  # its first request has missed already
    assert (found.n_due, found.n_met) == (4 - n_open, n_met)
    assert found.served_per_s is None


@pytest.mark.parametrize(("n_agents", "fit"), [(2, True), (3, False)])
def test_agents_meet_the_slo_as_long_as_their_kv_fits(tmp_path, n_agents, fit):
    """Prompts of 12 800 to 13 760 tokens and KV for two agents: a third evicts the others, and each
    of its prompts is cold. The first of each tree always is: 1 of 16."""
    turns = [asked(11.0 * k, list(range(200 + k)), took=1.0, out=2) for k in range(16)]
    path = written(tmp_path / "one.json", conversation(*turns))
    lanes = scenario(
        path,
        {"kind": "users", "users": n_agents, "think": "10s"},
        slo=["ttft <= 200ms", "attainment >= 90%"],
        phases={"warmup": "170s", "measure": "340s"},
    )
    run = simulate(
        lanes,
        shape="8b",
        hardware="a100",
        mode="chunked",
        block_tokens="64",
        kv_blocks=f"{2 * 217}",
    )
    finished = FinishedRun(run, summarize(run), Path())
    found = probe_of(finished, PLANNED, "measured", 510.0, 0.9, "01", "agents")
    assert found.n_due > 50
    assert (found.attainment >= 0.9) == fit
    assert found.attainment > 0.9 or found.attainment < 0.5


def test_the_verb_searches_agents_per_minute(corpus, tmp_path, page_cache):
    path = tmp_path / "agents.yaml"
    path.write_text(scenario(corpus, PER_MINUTE).to_yaml())
    words = ["capacity", str(path), "--target", "sim", "--over", "agents", "--budget", "300s"]
    words += ["--between", "6/min:24/min", "--engine", "shape=8b", "--json"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "search")])
    assert done.exit_code == 3, done.output
    answer = json.loads(done.stdout)
    assert (answer["outcome"], answer["unit"], answer["counted"]) == (
        "at_least",
        "agents/min",
        "requests",
    )
    assert answer["low"] == pytest.approx(24.0)
    stored = json.loads((tmp_path / "search" / "capacity.json").read_text())
    assert stored["definition"]["over"] == "agents"
    levels = [probe["level"] for probe in stored["probes"]]
    assert levels == pytest.approx([12.0, 24.0])
    bad = CliRunner().invoke(app, [*words[:-1], "--between", "1/s:x"])
    assert isinstance(bad.exception, UsageError)
    assert "write e.g. 2/min:40/min" in str(bad.exception)
