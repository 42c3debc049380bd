"""slobench solve: service times against the simulator, the table it writes, and its sentences."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import UsageError
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulate import simulate
from loadgen.lab.simulated_engine import build
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.records import REQUESTS
from loadgen.studies.solve.result import Averages, Level, Simulated, Solved
from loadgen.studies.solve.run import SOLVE, SolveSpec, mean_excess, solve
from loadgen.studies.solve.service_times import service_times_s
from loadgen.workload.scenario import scenario_from_flags
from reference_engine.smdp.batch_table import BatchTableFile
from reference_engine.smdp.decision_table import load_file

QUIET = Console(quiet=True)
TRAFFIC = ["solve", "--rate=1/s", "--input-len=512", "--output-len=4", "--hardware=h200"]
PADDED = {"hardware": "h200", "shape": "8b", "max_batch_size": "8", "pad_to": "1 2 4 8"}


def scenario(slo=(), **changes):
    overrides = {key.replace("__", "."): value for key, value in changes.items()}
    return scenario_from_flags(
        slo=slo, overrides=overrides, rate="1/s", input_len=512, output_len=4, duration="60s"
    )


AFFINE = {
    "engine": {"hardware": "cpu", "shape": "tiny", "max_batch_size": "8"},
    "scenario": scenario(
        requests__input_tokens={"kind": "fixed", "tokens": 16},
        requests__output_tokens={"kind": "fixed", "tokens": 8},
    ),
}
"""Short prompts on a CPU: the time of a batch is mostly that of its steps, and grows evenly."""


def spec(**fields):
    given = {"scenario": scenario(), "engine": PADDED, "loads": (0.5,), "n_seeds": 0, **fields}
    return SolveSpec(**given)


def solved(path, settings):
    with SOLVE.opened("", path) as place:
        return solve(place, settings, QUIET)


# --- service times


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("pad_to", ["", "4 8"])
def test_the_time_of_a_batch_is_that_of_the_simulator(size, pad_to):
    """Requests that arrive together, with prompts of different lengths, in one batch."""
    engine: dict[str, Any] = {
        "mode": "dynamic",
        "hardware": "h200",
        "shape": "8b",
        "max_batch_size": str(size),
    }
    if pad_to:
        engine["pad_to"] = pad_to
    burst = scenario(
        arrivals={"kind": "burst", "requests": size},
        requests__input_tokens={"kind": "uniform", "min": 200, "max": 900},
        requests__output_tokens={"kind": "uniform", "min": 2, "max": 9},
    )
    run = simulate(burst, **engine)
    requests, schedule = run.requests, run.schedule
    lengths = list(zip(schedule["input_tokens"], schedule["output_tokens"], strict=True))
    lengths = [(int(a), int(b)) for a, b in lengths]
    cost = build(sim_options(engine), False).simulator.replicas[0].state.view().cost
    sizes = [int(word) for word in pad_to.split()]
    times_s = service_times_s(cost, lengths, size, sizes)
    assert times_s[-1] == pytest.approx(float(requests["last_token_s"].max()), rel=0.005)


def test_times_grow_in_steps_where_batches_are_padded():
    cost = build(sim_options(PADDED | {"mode": "dynamic"}), False).simulator.replicas[0].state
    times_s = service_times_s(cost.view().cost, [(512, 4)], 8, [2, 8])
    # The cost of padding has no attention of prompts.
    assert times_s[0] == pytest.approx(times_s[1], rel=0.01)
    assert times_s[2:] == pytest.approx([times_s[7]] * 6, rel=0.01)
    assert times_s[2] > 2 * times_s[1]


# --- the solution


def test_with_padded_prompts_the_table_beats_greedy_and_every_limit(tmp_path):
    """At 60 % load, exactly, and on ten held-out schedules: the interval of the paired ratio is
    below 1 by more than a tenth."""
    result = solved(tmp_path / "s", spec(loads=(0.6,), n_seeds=10, n_requests=400))
    (level,) = result.levels
    assert level.table.cost < 0.85 * level.greedy.cost
    assert level.table.cost < 0.85 * level.control_limit.cost
    assert level.simulated.to_greedy.n == 10
    assert level.simulated.to_greedy.high < 0.9
    assert level.simulated.latency_s["table"] == pytest.approx(level.table.latency_s, rel=0.1)
    assert "below greedy (at 60% load)" in result.sentence()


def test_without_padding_the_table_is_worth_greedy(tmp_path):
    """A model on a CPU, whose batches take an affine time: the table is not worse on ten schedules,
    within 2 %."""
    settings = spec(**AFFINE, n_seeds=10, n_requests=150)
    result = solved(tmp_path / "s", settings)
    (level,) = result.levels
    assert 0.98 * level.greedy.cost < level.table.cost <= level.greedy.cost
    ratio = level.simulated.to_greedy
    assert 0.98 < ratio.low <= ratio.value <= ratio.high < 1.02
    assert result.sentence() == (
        "cost (simulated): no gain over greedy; no gain over the best control limit"
    )


def test_a_dear_watt_is_saved_by_waiting_like_the_best_limit(tmp_path):
    settings = spec(
        **AFFINE, loads=(0.3,), power_weight=0.01, watts=100.0, n_seeds=3, n_requests=150
    )
    (level,) = solved(tmp_path / "s", settings).levels
    assert level.limit > 1
    assert level.table.cost == pytest.approx(level.control_limit.cost, rel=1e-3)
    assert level.table.power_w < level.greedy.power_w
    assert level.simulated.to_greedy.high < 1


def test_the_file_is_read_by_the_engine_for_this_cost_model_only(tmp_path):
    result = solved(tmp_path / "s", spec(loads=(0.2, 0.6)))
    file = load_file(result.table, BatchTableFile)
    assert [len(sheet.batch_sizes) == len(sheet.action_gap) for sheet in file.tables] == [True] * 2
    ranges = [sheet.load_per_s for sheet in file.tables]
    most_per_s = result.levels[0].rate_per_s / 0.2
    assert np.array(ranges) / most_per_s == pytest.approx(np.array([[0, 0.4], [0.4, 1.2]]))
    assert file.pad_to == (1, 2, 4, 8)
    for hardware, fallbacks in (("h200", {}), ("h100", {"other_cost_model": 1})):
        engine = {**PADDED, "hardware": hardware, "mode": "dynamic", "table": result.table}
        options = sim_options(engine)
        state = build(options, False).simulator.replicas[0].state
        state.policy.plan(state.view())
        assert state.policy.explain("", state.view())["fallbacks"] == fallbacks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"power_weight": 1.0}, "--watts"),
        ({"late_weight": 1.0}, "--slo"),
        ({"engine": PADDED | {"mode": "chunked"}}, "--engine mode"),
        ({"engine": PADDED | {"table": "x"}}, "--engine table"),
        ({"engine": PADDED | {"kv_blocks": "100"}}, "only 3 of the longest requests fit"),
        ({"engine": PADDED | {"replicas": "2"}}, "single engine"),
        ({"engine": PADDED | {"shap": "8b"}}, "did you mean 'shape'"),
    ],
)
def test_what_cannot_be_solved_is_refused(tmp_path, fields, message):
    with pytest.raises(UsageError, match=message):
        solved(tmp_path / "s", spec(**fields))
    assert not (tmp_path / "s").exists()


def test_late_requests_count_from_the_slo_of_the_scenario():
    settings = replace(spec(late_weight=2.0), scenario=scenario(["p99(e2e)<=800ms", "ttft<=1s"]))
    objective = settings.objective()
    assert (objective.late, objective.slo_s) == (2.0, 0.8)


def test_the_excess_counts_requests_in_the_system_during_the_window():
    """Two requests in [1, 3), three in [3, 4), of which one is above a limit of two."""
    rows = np.zeros(3, REQUESTS)
    rows["released_s"], rows["last_token_s"] = [0, 1, 3], [4, 4, 9]
    assert mean_excess(rows, 2.0, 0.0, 10.0) == pytest.approx(0.1)
    assert mean_excess(rows, 0.0, 2.0, 4.0) == pytest.approx((2 + 3) / 2)


# --- the command line


def test_the_verb_prints_the_table_and_stores_it(tmp_path):
    words = ["--load", "50%", "--seeds", "2", "--requests", "60", "--slo", "e2e<=1s"]
    engine = ["--engine", "shape=8b,max_batch_size=8,pad_to=1 2 4 8"]
    out = tmp_path / "s"
    done = CliRunner().invoke(app, [*TRAFFIC, *words, *engine, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "batch sizes by waiting requests" in done.stdout
    assert "met the SLO: greedy" in done.stdout
    stored = json.loads((out / "solve.json").read_text())
    assert stored["levels"][0]["simulated"]["to_greedy"]["n"] == 2
    assert sorted(path.name for path in out.iterdir()) == [
        "checksums.sha256", "control_limit.json", "solve.json", "study.json", "table.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words", [["--load", "120%"], ["--load", "0%"], ["--engine", "hardware=a100"]]
)
def test_a_load_that_no_batch_can_serve_is_a_mistake(tmp_path, words):
    done = CliRunner().invoke(app, [*TRAFFIC, *words, "--out", str(tmp_path / "s")])
    assert isinstance(done.exception, UsageError)


# --- the sentence


def level(load, table, greedy=10.0, limit=10.0, simulated=None):
    """A level by its costs."""

    def of(cost):
        return Averages(cost, cost, 0.0, 0.0, 1.0)

    return Level(load, 1.0, 1, of(greedy), of(limit), of(table), (0, 1), simulated)


def result(*levels):
    return Solved(
        engine="an engine", table="t", cost_model="0", weights={"latency": 1.0}, slo_s=None,
        service_s=(1.0,), levels=levels, notes=(),
    )  # fmt: skip


def test_a_gain_is_stated_where_its_interval_is_below_one():
    def simulated(value, high):
        ratio = EstimateSection(value=value, low=0.1, high=high, n=10)
        return Simulated({}, {}, ratio, ratio)

    assert result(level(0.5, 7.0), level(0.9, 9.0, limit=9.1)).sentence() == (
        "cost (computed): up to 30% below greedy (at 50% load); "
        "up to 30% below the best control limit (at 50% load)"
    )
    proven = level(0.3, 7.0, simulated=simulated(0.8, 0.9))
    open_ = level(0.5, 5.0, simulated=simulated(0.5, 1.1))
    assert (
        result(proven, open_)
        .sentence()
        .startswith("cost (simulated): up to 20% below greedy (at 30% load)")
    )
    assert result(open_).sentence() == (
        "cost (simulated): no gain over greedy; no gain over the best control limit"
    )
