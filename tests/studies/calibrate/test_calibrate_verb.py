"""slobench calibrate from the command line: the three sources, what is refused, and the file."""

import json
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from loadgen.run.run_options import RunOptions
from loadgen.studies.calibrate.black_box import (
    CALIBRATE,
    cells,
    longest_prompt,
    measure,
    stated_length,
)
from reference_engine.model.hardware_file import read_calibrated
from reference_engine.state.cost_model import StepShape
from targets.embed import mock
from tests.studies.interrupted import InterruptedAt

KNOWN = """\
name: known
model: tiny
kv_tokens: 32768
costs: {step: 8ms, sequence: 0.5ms, prefill_sequence: 2ms, token: 50us, context_token: 1us}
"""


def slobench(*words, cwd=None):
    """(exit code, stdout, stderr) of a process of its own."""
    line = [sys.executable, "-m", "loadgen", *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run against a real-time simulated server of known costs, with its log."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "known.yaml").write_text(KNOWN)
    engine = f"shape=tiny,device=sim,hardware={folder / 'known.yaml'},log_level=full"
    load = ("--rate", "8/s", "--input-len", "200", "--output-len", "24", "--duration", "8s")
    words = ("run", "--target", "reference", "--engine", engine, *load, "--out", folder / "run")
    code, _, stderr = slobench(*words)
    assert code in (0, 3), stderr
    return folder


@pytest.mark.alone  # costs are times, which other tests would stretch
@pytest.mark.parametrize("source", ["--steps", "--run"])
def test_the_costs_of_a_real_time_simulated_server_come_back(measured, source):
    """A loaded machine delays the steps: the costs are the true ones times the median delay."""
    out = measured / f"{source[2:]}.yaml"
    words = (source, measured / "run", "--shape", "tiny", "--out", out, "--force", "--json")
    code, stdout, stderr = slobench("calibrate", *words)
    assert code == 0, stderr
    facts = json.loads(stdout)
    file = read_calibrated(out)
    assert (facts["accepted"], file.forced, file.model) == (True, True, "tiny")
    stated = {kind: error["error"] for kind, error in facts["by_kind"].items()}
    assert {kind: e.mean for kind, e in file.errors.items()} == pytest.approx(stated, rel=5e-3)
    assert file.measured["decode"].decodes[0] == 1
    # Of the true costs, a decode of 4 requests at 200 tokens each takes 8 + 4 · .55 + .8 ms.
    # The fit may choose another form for the same times (a floor in place of `step`).
    shape = StepShape(n_seqs=4, n_decode=4, context_tokens=800)
    decode_s = file.costs.step_cost().estimate(shape)
    steps = pq.read_table(measured / "run" / "engine_steps.parquet").to_pandas()
    decodes = steps[steps["n_prefill_tokens"] == 0]
    delay = ((decodes["end_s"] - decodes["began_s"]) / decodes["duration_s"]).median()
    assert decode_s == pytest.approx(11.0e-3 * delay, rel=0.25 if source == "--steps" else 0.4)
    if source == "--steps":
        assert file.kv_tokens == 32768


def test_the_simulator_runs_on_the_file_and_states_its_error(measured):
    out = measured / "used.yaml"
    words = ("--steps", measured / "run", "--shape", "tiny", "--out", out, "--force")
    assert slobench("calibrate", *words)[0] == 0
    load = ("--rate", "8/s", "--input-len", "200", "--output-len", "24", "--duration", "8s")
    where = ("--shape", "tiny", "--hardware", out, "--out", measured / "sim")
    code, _, stderr = slobench("simulate", *load, *where)
    assert code in (0, 3), stderr
    assert "costs measured (error " in stderr
    assert "steps vary as measured" in stderr
    variation = read_calibrated(out).variation
    # A paused step takes at least its time; the median step takes its cost.
    assert variation is not None
    assert variation.up_to[1:3] == (0.25, 0.5)
    assert 0.75 < variation.ratio[2] < 1.25


def test_a_fit_with_wrong_costs_exits_1_and_is_refused_until_forced(measured):
    """A server that slows down: the steps of the second half of the run are tripled in its log."""
    bad = measured / "bad"
    bad.mkdir()
    for name in ("engine_steps.parquet", "engine_events.parquet"):
        table = pq.read_table(measured / "run" / name)
        if "end_s" in table.column_names:
            ends, shift, late = table["end_s"].to_pylist(), 0.0, []
            for n, (begin, end) in enumerate(zip([ends[0], *ends], ends, strict=False)):
                shift += 2 * (end - begin) if n > len(ends) / 2 else 0.0
                late.append(end + shift)
            at = table.schema.get_field_index("end_s")
            table = table.set_column(at, "end_s", pa.array(late))
        pq.write_table(table, bad / name)
    out = measured / "bad.yaml"
    words = ("calibrate", "--steps", bad, "--shape", "tiny", "--out", out)
    code, stdout, _ = slobench(*words)
    assert code == 1
    assert "is refused by the simulator" in stdout
    simulate = ("simulate", "quickstart", "--shape", "tiny", "--hardware", out)
    code, _, stderr = slobench(*simulate, "--out", measured / "no")
    assert code == 2
    assert "steps are wrong by" in stderr
    assert "above 8%" in stderr
    assert slobench(*words, "--force")[0] == 0
    assert read_calibrated(out).forced


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "one of --steps, --run and --target, got none"),
        (("--run", "a", "--steps", "b"), "got --steps and --run"),
        (("--steps", "nowhere"), "engine_steps.parquet: not found"),
        (("--steps", "nowhere", "--out", "a.txt"), "ends in .yaml"),
        (("--steps", "nowhere", "--shape", "nan"), "nano"),
        (("--steps", "nowhere", "--resume"), "--resume continues the runs of --target"),
    ],
)
def test_a_mistake_is_a_usage_error(words, problem, tmp_path):
    shape = () if "--shape" in words else ("--shape", "nano")
    code, _, stderr = slobench("calibrate", *shape, *words, cwd=tmp_path)
    assert code == 2
    assert problem in stderr


def test_a_file_of_the_user_is_not_overwritten(measured):
    mine = measured / "mine.yaml"
    mine.write_text("name: mine\n")
    words = ("--steps", measured / "run", "--shape", "tiny", "--out", mine)
    code, _, stderr = slobench("calibrate", *words)
    assert code == 2
    assert "exists and holds no calibration" in stderr
    assert mine.read_text() == "name: mine\n"


@pytest.mark.alone  # as above
def test_an_idle_server_is_measured_from_outside_and_continued(tmp_path, measured):
    """Two requests at once at most, prompts up to 64 tokens; the second time nothing is measured
    again."""
    known = measured / "known.yaml"
    engine = f"shape=tiny,device=sim,hardware={known}"
    limits = ("--max-batch", "2", "--max-input-len", "64", "--force", "--json")
    words = ("--target", "reference", "--engine", engine, "--shape", "tiny", *limits)
    code, stdout, stderr = slobench("calibrate", *words, "--out", tmp_path / "box.yaml")
    assert code == 0, stderr
    costs = json.loads(stdout)["costs"]
    # A decode of 2 requests with 150 tokens each takes 8 + 2 · .55 + .3 ms.
    decode_s = costs["step_s"] + 2 * (costs["seq_s"] + costs["token_s"])
    assert decode_s + 300 * costs["context_token_s"] == pytest.approx(9.4e-3, rel=0.25)
    cells = sorted(path.name for path in (tmp_path / "box_runs").glob("*/r1"))
    code, _, stderr = slobench("calibrate", *words, "--out", tmp_path / "box.yaml")
    assert (code, "holds a calibration that began" in stderr) == (2, True), stderr
    code, again, stderr = slobench("calibrate", *words, "--out", tmp_path / "box.yaml", "--resume")
    assert (code, json.loads(again)) == (0, json.loads(stdout)), stderr
    assert "sending" not in stderr
    assert CALIBRATE.read(tmp_path / "box_runs").to_json() == json.loads(stdout)
    assert len(cells) == 19


@pytest.mark.parametrize(
    ("shape", "stated", "longest"),
    [("8b", 700, 508), ("8b", None, 3904), ("8b", 1 << 20, 3904), ("nano", 100, 1)],
)
def test_the_longest_prompt_leaves_room_for_the_answer_on_model_and_server(shape, stated, longest):
    """192 tokens of answer; the shapes admit 4096."""
    assert longest_prompt(shape, stated) == longest


def test_the_length_of_a_sequence_is_read_from_the_list_of_models(tmp_path):
    options = RunOptions()
    with mock({"max_model_len": "700"}, tmp_path) as served:
        url = served.endpoint.url
        assert stated_length(url, options) == 700
        assert stated_length(url, replace(options, model="another")) is None
        file = tmp_path / "box.yaml"
        file.write_text(f"url: {url}\n")
        assert stated_length(str(file), options) == 700
    with mock({}, tmp_path) as served:
        assert stated_length(served.endpoint.url, options) is None  # it states none
    assert stated_length(url, options) is None  # it has ended
    assert stated_length("reference", options) is None


def test_an_interrupted_calibration_continues_with_resume(tmp_path):
    runs, options = tmp_path / "box_runs", RunOptions(engine="ttft=2ms,itl=1ms")
    planned = cells("mock", options, max_input=16, max_batch=2)[:3]
    console = InterruptedAt("[3/3]")
    with pytest.raises(KeyboardInterrupt), CALIBRATE.opened("", runs) as place:
        measure(replace(place, out=tmp_path / "box.yaml"), planned, "mock", console)
    continues = f"--out {tmp_path / 'box.yaml'} --resume continues\n"
    printed = console.export_text()
    assert f"interrupted: 2 of 3 cells are measured; the same command with {continues}" in printed
    first = {path: path.stat().st_mtime_ns for path in runs.glob("*/r1/manifest.json")}
    assert len(first) == 2
    with CALIBRATE.opened("", runs, resume=True) as place:
        measured = measure(place, planned, "mock", Console(quiet=True))
    assert {path: path.stat().st_mtime_ns for path in first} == first
    assert measured.answers is not None
    assert measured.answers.n == 24 + 2 + 4  # requests of a prompt, of decodes alone and in pairs
