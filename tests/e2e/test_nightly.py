"""A night on a real server over real sockets: slower is worse, and the starter's files run."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from loadgen.cli.app import app
from loadgen.cli.starter import write_starter
from targets.endpoint import load_target

ROOT = Path(__file__).parents[2]
VERBS = get_command(app).commands  # type: ignore[attr-defined]  # a group, by its type
SHORT = """\
# Few requests, so that a test is over soon.
schema: 1
name: steady
seed: 7
arrivals: {kind: constant, rate: 5/s}
requests: {input_tokens: 16, output_tokens: 8}
phases: {warmup: 200ms, measure: 1s, drain: 20s}
"""
BUSY = """\
instrument: {lateness: 60s, loop_lag: 60s, read_backlog: 60s, cpu: 100%, run_delay: 100%}
"""
"""Whatever else the machine is doing, it is not what these tests are about."""


def night(cli, folder, name, *words):
    """A night whose instrument check is lifted: the steps only sleep, whatever else the machine
    is doing."""
    done = cli("nightly", "nightly.yaml", "--out", name, *words, cwd=folder, timeout_s=120)
    return done.returncode, json.loads((folder / name / "nightly.json").read_text())


@pytest.mark.e2e
@pytest.mark.timeout(300)  # four runs
def test_a_real_server_that_got_slower_is_worse(cli, tmp_path):
    # 20 ms a step that only sleeps, then 300 ms: a machine that stands still half of the time makes
    # 40 of the 20 and cannot hide that. That equal nights are the same, and how small a change is
    # found, are the tests' in which time is virtual: tests/nightly, tests/measure.
    (tmp_path / "steady.yaml").write_text(SHORT + BUSY)
    (tmp_path / "nightly.yaml").write_text(
        "schema: 1\ntargets: [reference]\nscenarios: [steady.yaml]\n"
        "engine: device=toy,shape=nano,step_s=0.02\nrepeats: 2\nmetrics: [p50(tpot)]\n"
        "margins: {default: 99%}\n"
    )
    code, facts = night(cli, tmp_path, "first")
    assert (code, facts["verdict"]) == (0, "baseline"), facts["cells"][0]["notes"]
    code, facts = night(cli, tmp_path, "second", "--engine", "step_delay=1400%")
    assert (code, facts["verdict"]) == (1, "worse")
    (row,) = [row for row in facts["cells"][0]["measures"] if row["is_gated"]]
    assert row["change"] > 3


@pytest.mark.e2e
@pytest.mark.timeout(120)  # six runs
def test_a_night_of_pairs_starts_both_servers_for_every_second_pair(cli, tmp_path):
    (tmp_path / "steady.yaml").write_text(SHORT + BUSY)
    (tmp_path / "nightly.yaml").write_text(
        "schema: 1\ntargets: [mock]\nscenarios: [steady.yaml]\n"
        "control: mock\nrepeats: 3\nmetrics: [p50(tpot)]\n"
    )
    code, facts = night(cli, tmp_path, "first")
    assert (code, facts["verdict"]) == (0, "baseline"), facts["cells"][0]["notes"]
    assert len(facts["cells"][0]["runs"]) == 3
    assert facts["cells"][0]["control"]["servers"] == "together"
    logs = sorted(path.name for path in (tmp_path / "first" / "servers").iterdir())
    assert logs == [
        "mock_steady_mock", "mock_steady_mock-1",
        "mock_steady_mock.control", "mock_steady_mock.control-1",
    ]  # fmt: skip


@pytest.mark.e2e
def test_the_files_of_init_run_as_they_are_but_shorter(cli, tmp_path):
    write_starter(tmp_path)
    steady = tmp_path / "slobench" / "steady.yaml"
    assert "phases: {warmup: 5s, measure: 30s, drain: 10s}" in steady.read_text()
    text = steady.read_text().replace("warmup: 5s, measure: 30s", "warmup: 500ms, measure: 2s")
    steady.write_text(
        f"{text}instrument: {{run_delay: 100%, cpu: 100%, lateness: 60s, loop_lag: 60s}}\n"
    )
    words = ["slobench/nightly.yaml", "--repeats", "2", "--out", "runs/nightly"]
    done = cli("nightly", *words, cwd=tmp_path, timeout_s=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("BASELINE"), done.stdout
    assert (tmp_path / "runs" / "nightly" / "index.html").exists()
    assert len(list((tmp_path / "slobench" / "baseline").glob("*/nights/*.json"))) == 1
    assert (
        cli("validate", "slobench/chat.yaml", "slobench/nightly.yaml", cwd=tmp_path).returncode == 0
    )


def commands(path, job):
    """The slobench commands of a workflow, as words."""
    steps = yaml.safe_load(path.read_text())["jobs"][job]["steps"]
    lines = [step["run"] for step in steps if "run" in step]
    return [line.split()[1:] for line in lines if "slobench " in line and "install" not in line]


def cached(path, job):
    steps = yaml.safe_load(path.read_text())["jobs"][job]["steps"]
    return [step["with"]["path"] for step in steps if "cache/" in step.get("uses", "")]


def check_workflow(path, root):
    found = commands(path, "nightly")
    assert len(found) == 2
    for verb, file, *flags in found:
        assert verb == "nightly"
        assert verb in VERBS
        baseline = yaml.safe_load((root / file).read_text())["baseline"]
        where = os.path.normpath(Path(file).parent / baseline)
        assert cached(path, "nightly") == [where, where]
        assert flags in (["--accept"], ["--out", "runs/nightly"])
    said = yaml.safe_load(path.read_text())
    assert "schedule" in said[True], "YAML 1.1 reads the key `on` as true"


def test_the_workflow_of_this_project_names_what_exists():
    check_workflow(ROOT / ".github" / "workflows" / "nightly.yml", ROOT)


def test_the_workflow_of_init_names_what_init_wrote(tmp_path):
    write_starter(tmp_path)
    check_workflow(tmp_path / ".github" / "workflows" / "slobench-nightly.yml", tmp_path)


def test_the_workflow_makes_the_control_that_its_file_names():
    folder = ROOT / "benchmarks" / "nightly"
    ours, pinned = (
        yaml.safe_load((folder / name).read_text())
        for name in ("nightly.yaml", "against_pinned.yaml")
    )
    assert ours.pop("control") == "reference"
    assert pinned.pop("control") == {"target": "pinned.yaml", "servers": "together"}
    assert ours == pinned, "the two differ in their control alone"
    steps = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())["jobs"]["nightly"]
    (script,) = [step["run"] for step in steps["steps"] if ".pinned" in step.get("run", "")]
    first, *rest = script.splitlines()
    found = subprocess.run(
        ["sh", "-c", f"{first}; echo $commit"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    target = load_target(str(folder / "pinned.yaml"), {})
    assert target.launch is not None
    assert target.launch.cwd is not None
    assert target.labels.version == found.stdout.strip()
    assert len(found.stdout.strip()) == 40
    assert target.launch.python.startswith(rest[1].split()[-2] + "/")
    assert (target.launch.cwd / ".github").is_dir()


@pytest.mark.e2e
@pytest.mark.timeout(180)  # four runs
def test_a_pinned_server_is_measured_beside_the_engine_under_test(cli, tmp_path):
    # Steps that only sleep: 20 ms of the control, 300 ms of the cell, on whatever machine.
    (tmp_path / "steady.yaml").write_text(SHORT + BUSY)
    (tmp_path / "pinned.yaml").write_text(
        "launch: {preset: reference, model: nano, args: [--device, toy, --set, step_s=0.02]}\n"
        "labels: {version: 0.1.0}\n"
    )
    (tmp_path / "nightly.yaml").write_text(
        "schema: 1\ntargets: [reference]\nscenarios: [steady.yaml]\n"
        "engine: device=toy,shape=nano,step_s=0.02\ncontrol: pinned.yaml\nrepeats: 2\n"
        "metrics: [p50(tpot)]\n"
    )
    code, facts = night(cli, tmp_path, "first", "--engine", "step_delay=1400%")
    (cell,) = facts["cells"]
    assert (code, facts["verdict"]) == (0, "baseline"), cell["notes"]
    assert cell["control"]["labels"] == {"version": "0.1.0"}
    (point,) = cell["trends"]["p50(tpot)"]
    assert point["value"] > 3
    assert point["value"] == pytest.approx(point["absolute"] / point["control"])
    epochs = [
        json.loads((tmp_path / "first" / run[side] / "manifest.json").read_text())["epoch_utc"]
        for run in cell["runs"]
        for side in ("control_directory", "directory")
    ]
    assert [epochs.index(epoch) for epoch in sorted(epochs)] == [0, 1, 3, 2], "control first, last"
