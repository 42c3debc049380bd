"""Sizing: arithmetic by known answers, and simulated replicas against the number it returns."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import RunInvalid, UsageError
from loadgen.lab.simulate import simulate
from loadgen.manifest.sections import LabelsSection
from loadgen.records import SERVER
from loadgen.studies.capacity.files import CAPACITY
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import Capacity, CapacityFile, Definition, answer_of
from loadgen.studies.size.demand import Demand, Interval, Variant, by_division, costs, sensitivity
from loadgen.studies.size.page import render
from loadgen.studies.size.result import Size, Trial
from loadgen.studies.size.run import SIZE, SizeSpec, attainment, gpus_of, read_capacity, size
from loadgen.workload.scaling import scaled, with_window
from loadgen.workload.scenario import load_scenario
from tests.runs import measured_run, with_manifest, write_to
from tests.shown import tables
from tests.studies.interrupted import InterruptedAt

QUIET = Console(quiet=True)
ENGINE = "hardware=a100,shape=8b"


def scenario():
    return load_scenario(
        "capacity_search",
        ["phases.warmup=10s", "phases.measure=40s", "phases.drain=30s"],
    )


FOUND = Capacity(
    "found", "req/s", value=7.4, low=7.1, high=7.7, confidence=0.95, attainment=0.9,
    precision=0.05, spent_s=60.0, probes=(), client_limit=None, design_effect=None, slope=None,
)  # fmt: skip


def stored(directory, answer=(), definition=(), labels=(), probes=()):
    """A directory with the files of a capacity search that `size` reads."""
    of_search = {
        "scenario": json.loads(json.dumps(scenario().resolved())),
        "target": "http://localhost:8000", "engine": "", "model": "", "over": "rate",
        "attainment": 0.9, "between": None, **dict(definition),
    }  # fmt: skip
    with CAPACITY.opened("", directory) as place:
        place.write(
            CapacityFile(
                command=[],
                definition=Definition(**of_search),
                answer=answer_of(replace(FOUND, **dict(answer))),
                probes=list(probes),
            )
        )
    run = measured_run()
    target = structs.replace(run.manifest.target, labels=LabelsSection(**dict(labels)))
    write_to(directory / "probes" / "01", with_manifest(run, target=target))
    return directory


def sized(spec, out, resume=False):
    with SIZE.opened("few", out, resume=resume) as place:
        return size(place, spec, QUIET)


def probe(name, level, grade):
    return Probe(level, (9,) * 16, (9,) * 16, 10, 40, 60, grade, name)


def test_division_rounds_up_and_forgives_rounding_errors():
    assert by_division(48.0, 7.1) == 7
    assert by_division(3 * 0.1, 0.1) == 3  # 0.30000000000000004
    assert by_division(0.1, 7.1) == 1


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e3))
def test_divided_replicas_suffice_and_a_replica_less_does_not(load_per_s, capacity_per_s):
    n = by_division(load_per_s, capacity_per_s)
    assert n * capacity_per_s >= load_per_s * (1 - 1e-8)
    assert n == 1 or (n - 1) * capacity_per_s < load_per_s


def test_each_assumption_is_varied_alone():
    demand = Demand(peak_per_s=40, headroom=0.2, survive=1, gpus_per_replica=4)
    variants = list(sensitivity(demand, Interval(7.1, 7.4, 7.7, 0.95), n_added=1))
    assert variants == [
        Variant("capacity at its estimate, 7.4 req/s", 9, 36),
        Variant("capacity at its upper end, 7.7 req/s", 9, 36),
        Variant("peak 36 req/s", 9, 36),
        Variant("peak 44 req/s", 10, 40),
        Variant("peak 50 req/s", 11, 44),
        Variant("headroom 0 %", 8, 32),
        Variant("headroom 40 %", 10, 40),
        Variant("0 replicas may fail", 8, 32),
        Variant("2 replicas may fail", 10, 40),
    ]


def test_costs_are_those_of_all_gpus_at_the_peak():
    demand = Demand(peak_per_s=40, headroom=0.2, survive=1, gpus_per_replica=4)
    spent = costs(demand, 36, (24_000.0, 10_000.0), price_per_gpu_hour=2.5, watts_per_gpu=700)
    assert spent.goodput_per_gpu_per_s == pytest.approx(1.1111, abs=1e-4)
    assert spent.price_per_hour == 90.0
    assert spent.price_per_million == pytest.approx(2.5)  # 90 per 36 million tokens
    assert spent.energy_kwh_per_million == pytest.approx(0.7)  # 25.2 kW for 100 s
    assert costs(demand, 36, (1.0, 1.0), None, None).price_per_million is None


def test_a_measured_capacity_is_divided_at_its_lower_end(tmp_path):
    directory = stored(tmp_path / "search", labels={"gpus": 4})
    demand = Demand(40, 0.2, 1, gpus_of(directory, ""))
    result = sized(SizeSpec(scenario(), demand, directory, "", attainment=0.9), tmp_path / "out")
    assert (result.n_divided, result.n_replicas, result.n_gpus) == (7, 8, 32)
    assert result.trials == ()
    assert "bursts and routing were not simulated" in result.notes[0]
    assert json.loads((tmp_path / "out" / "size.json").read_text())["n_gpus"] == 32
    assert SIZE.read(tmp_path / "out") == result


def test_the_energy_is_that_of_the_measured_probe_nearest_to_the_capacity(tmp_path):
    probes = [
        probe("01", 2.0, "measured"), probe("02", 7.0, "measured"), probe("03", 7.4, "saturated"),
    ]  # fmt: skip
    directory = stored(tmp_path / "search", probes=probes)
    for name, watts in (("01", 400.0), ("02", 2400.0), ("03", 2800.0)):
        run = measured_run()
        # The first reading is before the measured window, which begins after 2 s.
        readings = np.array([(1.0, 1, 100.0), (5.0, 1, watts - 40), (9.0, 1, watts + 40)], SERVER)
        names = replace(run.names, series=("", "gpu_power_w"))
        write_to(directory / "probes" / name, replace(run, names=names, server_rows=readings))
    demand = Demand(40, 0.2, 1, gpus_per_replica=4)
    result = sized(SizeSpec(scenario(), demand, directory, "", attainment=0.9), tmp_path / "out")
    assert "energy: the server reported 600 W per GPU at 7 req/s" in result.notes
    spent = result.costs
    assert spent is not None
    assert spent.energy_kwh_per_million is not None
    used_w = spent.energy_kwh_per_million * 3.6 * spent.output_tokens_per_s
    assert used_w == pytest.approx(32 * 600)  # 8 replicas of 4 GPUs
    given = SizeSpec(scenario(), demand, directory, "", attainment=0.9, watts_per_gpu=0.0)
    spent = sized(given, tmp_path / "given").costs
    assert spent is not None
    assert spent.energy_kwh_per_million == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"unit": "users"}, "search with --over rate"),
        ({"low": None}, "no lower end to divide by"),
        ({"attainment": 0.5}, "searched for 50 % of the requests, below the 90 %"),
    ],
)
def test_a_capacity_that_does_not_fit_is_refused(tmp_path, changed, message):
    with pytest.raises(UsageError, match=message):
        read_capacity(stored(tmp_path / "search", answer=changed), 0.9)


@pytest.mark.faults
@pytest.mark.parametrize(
    "bounds",
    [
        {"low": 7.8, "value": 7.4, "high": 7.7},
        {"low": 7.1, "value": 7.4, "high": 7.2},
        {"low": 0.0, "value": 7.4, "high": 7.7},
    ],
)
def test_a_capacity_whose_bounds_are_out_of_order_is_refused(tmp_path, bounds):
    texts = ", ".join(f"{bound:g}" for bound in bounds.values())
    with pytest.raises(RunInvalid, match=rf"capacity\.json: its bounds are .*\({texts} req/s\)"):
        read_capacity(stored(tmp_path / "search", answer=bounds), 0.9)


@pytest.mark.faults
def test_an_edited_search_is_not_divided(tmp_path):
    directory = stored(tmp_path / "search")
    path = directory / "capacity.json"
    path.write_text(path.read_text().replace('"low": 7.1', '"low": 70.1'))
    words = ["size", "capacity_search", "--capacity", directory, "--peak=40/s", "--attainment=90%"]
    refused = CliRunner().invoke(app, [*map(str, words), f"--out={tmp_path / 'out'}"])
    assert isinstance(refused.exception, RunInvalid)
    assert str(refused.exception).startswith(f"{path}: damaged: it does not match its line")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_search_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no result of a capacity search"):
        read_capacity(tmp_path, 0.9)


def test_another_scenario_than_the_searched_is_noted(tmp_path):
    other = json.loads(json.dumps(scenario().resolved())) | {"slo": ["ttft <= 9s"]}
    directory = stored(tmp_path / "search", definition={"scenario": other})
    demand = Demand(40, 0.0, 0, 1)
    result = sized(SizeSpec(scenario(), demand, directory, "", attainment=0.9), tmp_path / "out")
    assert any("searched with another scenario: slo" in note for note in result.notes)


def test_the_size_keeps_the_slo_and_a_replica_less_does_not(tmp_path):
    # (N − 0.4) × capacity with N = 3. A search found 20.9 req/s for this engine.
    found = {"low": 20.5, "value": 20.9, "high": 21.3}
    of_sim = {"target": "sim", "engine": ENGINE}
    directory = stored(tmp_path / "search", answer=found, definition=of_sim)
    peak_per_s = 2.6 * 20.9
    demand = Demand(peak_per_s, 0.0, survive=1, gpus_per_replica=2)
    spec = SizeSpec(scenario(), demand, directory, "", attainment=0.9, n_schedules=1)
    result = sized(spec, tmp_path / "out")
    assert (result.n_divided, result.n_serving) == (3, 3)
    assert (result.n_replicas, result.n_gpus) == (4, 8)
    others = {v.assumption: (v.replicas, v.gpus) for v in result.sensitivity}
    assert others["router join_shortest_queue"] == (4, 8)
    assert {(t.n_replicas, t.is_met) for t in result.trials} >= {(3, True), (2, False)}
    # a schedule that the sizing has not seen
    traffic = with_window(scaled(scenario(), peak_per_s, "rate"), 10.0, 40.0, seed=5)
    three, two = (
        attainment(simulate(traffic, hardware="a100", replicas=n, router="power_of_two"))
        for n in (3, 2)
    )
    assert three >= 0.9 > two


def test_bursts_are_simulated_at_the_same_share_of_the_capacity_as_measured(tmp_path):
    """The measured server serves 2 req/s and its simulated stand-in 20.9: 2.6 measured replicas are
    worth 2.6 simulated ones, at ten times the load."""
    found = {"low": 2.0, "value": 2.1, "high": 2.2}
    directory = stored(tmp_path / "search", answer=found)
    demand = Demand(2.6 * 2.0, 0.0, 0, 1)
    spec = SizeSpec(
        scenario(), demand, directory, ENGINE, attainment=0.9, n_schedules=1, budget_s=60.0
    )
    result = sized(spec, tmp_path / "out")
    assert result.simulated_per_s == pytest.approx(2.6 * 20.9, rel=0.08)
    assert (result.n_divided, result.n_serving) == (3, 3)
    assert {(t.n_replicas, t.is_met) for t in result.trials} >= {(3, True), (2, False)}


def test_the_verb_prints_replicas_gpus_and_json(tmp_path):
    directory = stored(tmp_path / "search", labels={"gpus": 4})
    words = ["size", "capacity_search", "--capacity", str(directory), "--peak", "40/s"]
    words += ["--attainment", "90%", "--price", "2.5", "--out", str(tmp_path / "out")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("32 GPUs: 8 replicas of 4\n")
    assert "48 req/s; / 7.1 req/s = 7 replicas" in shown.stdout
    as_json = CliRunner().invoke(app, [*words, "--resume", "--json"])
    assert json.loads(as_json.stdout)["n_replicas"] == 8


def test_the_verb_writes_a_page_that_report_names_again(tmp_path):
    directory, out = stored(tmp_path / "search", labels={"gpus": 4}), tmp_path / "out"
    words = ["size", "capacity_search", "--capacity", str(directory), "--peak", "40/s"]
    made = CliRunner().invoke(app, [*words, "--attainment", "90%", "--out", str(out)])
    assert f"report: {out / 'report.html'}" in made.stderr
    page = (out / "report.html").read_text()
    assert '<h2 id="verdict">32 GPUs: 8 replicas of 4</h2>' in page
    computed = dict(re.findall(r'<tr><th scope="row">([\w ]+)</th><td>(.*?)</td></tr>', page))
    assert computed["division"] == "48 req/s / 7.1 req/s = 7 replicas"
    assert computed["failures"] == "+ 1 = 8 replicas"
    assert computed["GPUs"] == "8 × 4 = 32"
    assert "Simulated replicas" not in page  # none was simulated
    assert "Add --hardware FILE" in page
    again = CliRunner().invoke(app, ["report", str(out)])
    assert again.stdout.startswith("32 GPUs: 8 replicas of 4\n")
    assert str(out / "report.html") in again.stderr


def test_the_page_shows_the_simulated_replicas_and_what_misses(tmp_path):
    demand = Demand(10.0, 0.2, 1, 2)
    trials = (Trial("power_of_two", 3, (0.5,), False), Trial("power_of_two", 4, (0.95, 0.91), True))
    result = Size(
        demand=demand, capacity=Interval(4.0, 4.2, 4.5, 0.95), target=0.9, router="power_of_two",
        n_divided=3, n_serving=4, n_replicas=5, n_gpus=10, simulated_per_s=12.6, trials=trials,
        sensitivity=(Variant("headroom 0 %", 4, 8),), notes=("<b>",), exit_code=0,
        costs=costs(demand, 10, (100.0, 50.0), 2.0, None),
    )  # fmt: skip
    page = render(result, scenario(), ["slobench", "size"])
    assert '<h2 id="verdict">10 GPUs: 5 replicas of 2</h2>' in page
    assert "4 replicas serve it under every simulated schedule; 1 of them for bursts" in page
    heads, rows = next(found for found in tables(page) if found[0][:1] == ["router"])
    assert heads[1:4] == ["replicas", "verdict", "lowest share"]
    assert rows == [
        ["power_of_two", "3", "missed", "50.00 %", "50.00 %"],
        ["power_of_two", "4", "met", "91.00 %", "95.00 %, 91.00 %"],
    ]
    assert (["assumption", "replicas", "GPUs"], [["headroom 0 %", "4", "8"]]) in tables(page)
    assert "&lt;b&gt;" in page
    nothing = structs.replace(result, n_serving=None, n_replicas=None, n_gpus=None, costs=None)
    assert "No answer: up to 4 replicas miss the SLO" in render(nothing, scenario(), [])


def test_the_verb_needs_a_capacity(tmp_path):
    failed = CliRunner().invoke(app, ["size", "capacity_search", "--peak", "40/s"])
    assert failed.exit_code != 0
    assert "--capacity DIR" in str(failed.exception)


def test_an_interrupted_search_continues_with_resume(tmp_path):
    short = load_scenario("capacity_search", ["phases.warmup=1s", "phases.measure=5s"])
    spec = SizeSpec(short, Demand(10, 0.2, 1, 1), None, ENGINE, attainment=0.9, n_schedules=1,
                    budget_s=60.0)  # fmt: skip
    out, search_dir = tmp_path / "out", tmp_path / "out" / "capacity"
    console = InterruptedAt("probe 3:")
    with pytest.raises(KeyboardInterrupt), SIZE.opened("few", out) as place:
        size(place, spec, console)
    continues = f"2 probes done; the same command with --out {out} --resume continues\n"
    assert f"interrupted: {continues}" in console.export_text()
    assert not (out / "size.json").exists()
    first = CAPACITY.read(search_dir).probes
    assert len(first) == 2
    with pytest.raises(UsageError, match="add --resume to continue it"):
        sized(spec, out)
    result = sized(spec, out, resume=True)
    search = CAPACITY.read(search_dir)
    assert search.probes[:2] == first
    assert (result.capacity.low, result.capacity.value) == (search.answer.low, search.answer.value)
    assert len(search.probes) > 2
    assert SIZE.read(out) == result
    more = sized(replace(spec, demand=replace(spec.demand, peak_per_s=30)), out, resume=True)
    assert more.n_divided > result.n_divided
    assert CAPACITY.read(search_dir).probes == search.probes, "another peak needs no other search"
    with pytest.raises(UsageError, match="the capacity search there has other settings"):
        sized(replace(spec, attainment=0.95), out, resume=True)


def test_a_search_that_cannot_begin_leaves_no_directory(tmp_path):
    spec = SizeSpec(scenario(), Demand(20, 0.2, 1, 1), None, "hardware=x9", attainment=0.9)
    with pytest.raises(UsageError):
        sized(spec, tmp_path / "out")
    assert not (tmp_path / "out").exists()
