"""A night from the file to the verdict, in virtual time: baseline, same, worse, accepted."""

import json
import shutil
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

import slobench as sb
from loadgen.cli.app import app
from loadgen.cli.exit_codes import guarded
from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.order import run_cells
from loadgen.studies.nightly import run as night_module
from loadgen.studies.nightly.files import NIGHTLY
from loadgen.studies.nightly.run import Nightly, NightOptions
from tests.studies.nightly import few

MORE = "metrics: [p50(ttft), mean(tpot)]\n"


def suite_of(directory):
    suite = ET.parse(directory / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    return suite


@pytest.fixture
def folder(tmp_path):
    few.write(tmp_path, MORE)
    return tmp_path


@pytest.fixture(scope="session")
def nightly(cache):
    """`sb.nightly`, with the plotting bundle made once."""
    return partial(sb.nightly, cache_dir=cache)


@pytest.fixture(scope="module")
def two_nights(nightly, tmp_path_factory):
    """A folder with a nightly file whose baseline has two equal nights."""
    base = tmp_path_factory.mktemp("nights")
    file = few.write(base, MORE)
    nights = [nightly(file, base / f"night{k}") for k in (1, 2)]
    assert [night.verdict for night in nights] == ["baseline", "same"]
    assert [night.exit_code for night in nights] == [0, 0]
    return base


@pytest.fixture
def copied(two_nights, tmp_path):
    return Path(shutil.copytree(two_nights, tmp_path / "copy"))


@pytest.fixture
def shown(capsys, monkeypatch, cache):
    """`shown(*words)`: the exit code, standard output and standard error of a command line."""

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))

    def run(*words):
        monkeypatch.setattr("sys.argv", ["slobench", *map(str, words)])
        capsys.readouterr()
        code = guarded(app, {})
        return code, *capsys.readouterr()

    return run


def test_a_slower_engine_is_worse_and_every_output_says_so(
    shown, nightly, copied, tmp_path, monkeypatch
):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://forge.example")
    monkeypatch.setenv("GITHUB_REPOSITORY", "us/engine")
    monkeypatch.setenv("GITHUB_RUN_ID", "12")
    file, out = copied / "nightly.yaml", copied / "slow"
    slow = ("--engine", "step_delay=10%")
    code, told, errors = shown("nightly", file, "--out", out, *slow, "--full")
    assert code == 1
    assert told.startswith("WORSE: At least one measure got worse.")
    assert "▼ sim_few_chunked  worse: p50(ttft) 4.49 ms → 4.94 ms, +10 % [+10, +10]" in told
    assert "step_delay=10%" in told
    assert "::error title=slobench nightly::sim_few_chunked: mean(tpot) is worse, +10 %25" in errors
    summary = (tmp_path / "summary").read_text()
    assert summary == (out / "summary.md").read_text()
    assert "| mean(tpot) |" in summary
    suite = suite_of(out)
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "2", "0")
    facts = json.loads((out / "nightly.json").read_text())
    assert (facts["verdict"], facts["exit_code"]) == ("worse", 1)
    assert NIGHTLY.read(out).to_json() == facts
    (cell,) = facts["cells"]
    assert [p["verdict"] for p in cell["trends"]["mean(tpot)"]] == ["baseline", "same", "worse"]
    rows = {row["measure"]: row for row in cell["measures"]}
    assert rows["mean(tpot)"]["change"] == pytest.approx(0.1, abs=0.005)
    assert cell["noise"]["mean(tpot)"]["assumed_df"] > 0
    page = (out / "index.html").read_text()
    assert "trend-1-1" in page
    assert "https://forge.example/us/engine/actions/runs/12" in page
    (run, _) = cell["runs"]
    assert (out / run["directory"] / "report.html").exists()
    for more in ([], ["--resume"]):
        assert "holds a finished night" in shown("nightly", file, "--out", out, *more)[2]

    # It did not become the baseline: tomorrow it is worse again, until it is accepted.
    again = nightly(file, copied / "again", engine="step_delay=10%")
    assert (again.verdict, again.cells[0].n_nights) == ("worse", 2)
    code, told, _ = shown("nightly", file, "--accept")
    assert (code, told.count("a new level, from night")) == (0, 1)
    after = nightly(file, copied / "after", engine="step_delay=10%")
    assert (after.verdict, after.cells[0].n_nights) == ("same", 2)
    assert nightly(file, copied / "back").verdict == "better"


def test_a_summary_that_cannot_be_written_leaves_the_verdict(shown, copied, tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "gone" / "summary"))
    file, out = copied / "nightly.yaml", copied / "slow"
    slow = ("--engine", "step_delay=10%")
    code, told, errors = shown("nightly", file, "--out", out, *slow, "--full")
    assert (code, told.splitlines()[0]) == (1, "WORSE: At least one measure got worse.")
    assert "GITHUB_STEP_SUMMARY" in errors
    assert str(out / "summary.md") in errors


def test_a_baseline_that_cannot_be_written_is_refused_before_anything_runs(shown, copied, tmp_path):
    (tmp_path / "file").touch()
    out = copied / "none"
    code, _, errors = shown(
        "nightly", copied / "nightly.yaml", "--out", out, "--baseline", tmp_path / "file" / "base"
    )
    assert code == 2
    assert "cannot be written" in errors
    assert not out.exists()


def test_the_first_night_judges_nothing(nightly, folder):
    night = nightly(folder / "nightly.yaml", folder / "out", baseline=folder / "elsewhere")
    assert (night.verdict, night.exit_code, night.cells[0].measures) == ("baseline", 0, ())
    suite = suite_of(folder / "out")
    assert (suite.get("tests"), suite.get("skipped")) == ("1", "1")
    assert len(list((folder / "elsewhere").rglob("nights/*.json"))) == 1
    assert not (folder / "baseline").exists()


def test_a_new_key_is_named_with_its_value(copied, cache):
    text = (copied / "nightly.yaml").read_text()
    (copied / "nightly.yaml").write_text(text + "engine: token_budget=512\n")
    options = NightOptions(run=RunOptions(cache_dir=cache))
    night = Nightly(copied / "nightly.yaml", options)
    console = Console(record=True, width=200)
    found = night.run(console, copied / "other")
    assert found.verdict == "baseline"
    said = console.export_text()
    assert "starts a new baseline" in said
    assert "settings.token_budget: '(not there)' → '512'" in said


def test_a_damaged_baseline_stops_the_night_before_it_begins(shown, copied):
    path = sorted(copied.rglob("nights/*.json"))[0]
    path.write_text("{")
    code, _, errors = shown("nightly", copied / "nightly.yaml", "--out", copied / "new")
    assert code == 2
    assert f"baseline {path}: it is damaged" in errors
    assert not (copied / "new").exists()


def test_an_interrupted_night_keeps_its_runs_and_goes_on(shown, folder, monkeypatch):
    def interrupted(*args, **options):
        yield next(iter(run_cells(*args, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(night_module, "run_cells", interrupted)
    file, out = folder / "nightly.yaml", folder / "out"
    code, _, errors = shown("nightly", file, "--out", out)
    assert code == 130
    assert f"the same command with --out {out} --resume continues" in errors
    assert not (folder / "baseline").exists()
    first = (out / "sim_few_chunked" / "r1" / "manifest.json").stat().st_mtime_ns
    monkeypatch.undo()
    code, _, errors = shown("nightly", file, "--out", out)
    assert (code, "add --resume to continue it" in errors) == (2, True)
    code, told, _ = shown("nightly", file, "--out", out, "--resume", "--json")
    assert code == 0
    assert (out / "sim_few_chunked" / "r1" / "manifest.json").stat().st_mtime_ns == first
    (kept,) = folder.glob("baseline/*/nights/*.json")
    began = datetime.fromisoformat(json.loads((out / "study.json").read_text())["began_utc"])
    assert kept.stem == f"{began:%Y%m%dT%H%M%S.%f}Z"
    result = NIGHTLY.read(out)
    assert (result.night, result.started_utc) == (kept.stem, began.isoformat())
    assert result.to_json() == json.loads(told) == json.loads((out / "nightly.json").read_text())


@pytest.mark.faults
def test_a_night_without_a_valid_run_exits_3(shown, folder, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    (folder / "nightly.yaml").write_text(
        "schema: 1\ntargets: {gone: 'http://127.0.0.1:9'}\nscenarios: [few.yaml]\nrepeats: 2\n"
    )
    code, told, errors = shown("nightly", folder / "nightly.yaml", "--out", folder / "a")
    assert (code, "INVALID: A cell has no valid run." in told) == (3, True)
    assert "A repeat is missing: repeat 1:" in told
    assert "::error title=slobench nightly::gone_few: invalid." in errors
    suite = suite_of(folder / "a")
    assert suite.get("errors") == "1"


def test_another_model_than_the_baselines_is_not_compared(nightly, copied):
    asked = Nightly(copied / "nightly.yaml", NightOptions())
    (cell,) = asked.cells
    last = asked.store.nights(cell)[-1]
    other = replace(last, factor={**last.factor, "target.model": "70b"})
    asked.store.add(cell, other)
    night = nightly(copied / "nightly.yaml", copied / "new")
    assert night.verdict == "invalid"
    assert "target.model: 70b against 8b" in night.cells[0].notes[0]


def test_validate_reads_a_nightly_file_with_all_it_names(shown, folder):
    code, told, _ = shown("validate", folder / "nightly.yaml", folder / "few.yaml")
    assert code == 0
    assert "nightly.yaml: ok (1 cells a night)" in told
    (folder / "few.yaml").unlink()
    code, _, errors = shown("validate", folder / "nightly.yaml")
    assert code == 2
    assert "scenarios.few: " in errors


def test_an_unknown_word_is_answered_with_the_nearest(shown, folder):
    file = folder / "nightly.yaml"
    assert "did you mean 'worse'" in shown("nightly", file, "--fail-on", "wors")[2]
    assert "cannot be read" in shown("nightly", folder / "no.yaml")[2]
    file.write_text("schema: 1\ntargets: ['http://127.0.0.1:9']\nscenarios: [few.yaml]\n")
    with pytest.raises(UsageError, match="--engine needs a server that slobench starts"):
        Nightly(file, NightOptions(engine="step_delay=10%"))
