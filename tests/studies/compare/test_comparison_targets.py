"""`slobench compare --target A --target B`: two targets measured in turns, then compared."""

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.archive.store import read_run
from loadgen.cli.app import app
from loadgen.errors import TargetError, UsageError
from loadgen.studies.compare.run import COMPARE

TRAFFIC = ["--rate", "8", "--input-len", "64", "--output-len", "8", "--duration", "4"]
SIM = ["--target", "sim", "--target", "sim"]


def test_two_targets_are_measured_in_turns_with_the_same_requests(tmp_path):
    out = tmp_path / "c"
    engines = ["--engine", "shape=8b,mode=chunked", "--engine", "shape=8b,mode=static"]
    words = ["compare", *SIM, *engines, *TRAFFIC, "--repeats", "2", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, words)
    facts = json.loads(result.stdout)
    assert (result.exit_code, facts["verdict"]) == (1, "worse")
    assert "2 runs each: 16 s of traffic" in result.stderr
    assert "[4/4]" in result.stderr
    order = sorted((out / side / f"r{k}" for side in "AB" for k in (1, 2)), key=_began)
    sides = [directory.parent.name for directory in order]
    assert sorted(sides[:2]) == sorted(sides[2:]) == ["A", "B"]
    digests = {read_run(directory).manifest.schedule_sha256 for directory in order}
    assert len(digests) == 2
    assert "<html" in (out / "compare.html").read_text()[:200].lower()
    assert json.loads((out / "compare.json").read_text()) == facts
    assert COMPARE.read(out).to_json() == facts
    refused = CliRunner().invoke(app, words)
    assert "holds a comparison that began" in str(refused.exception)
    again = CliRunner().invoke(app, [*words, "--resume"])
    assert again.exit_code == 1
    assert "/4]" not in again.stderr  # nothing is measured twice
    assert sorted((out / s / f"r{k}" for s in "AB" for k in (1, 2)), key=_began) == order


def _began(directory):
    return (directory / "manifest.json").stat().st_mtime_ns


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--target", "sim", *TRAFFIC], "--target: expected two"),
        ([*SIM, "quickstart", "steady"], "name one scenario, or none, not 2 runs"),
        ([*SIM, "--rate", "8"], "add --input-len, --output-len"),
        ([*SIM, *TRAFFIC, *["--engine", "shape=8b"] * 3], "--engine: expected one for both sides"),
        (["quickstart"], "To measure two targets first: --target A --target B"),
        (["a", "b", "--out", "c"], "--out: is the directory of runs that --target A --target B"),
        (["a", "b", "--resume"], "--resume: is the directory of runs that --target A --target B"),
        (["a", "--aa", "--out", "c"], "--out: is the directory of runs that --target A --target B"),
    ],
)
def test_a_mistake_names_what_is_missing(words, problem):
    result = CliRunner().invoke(app, ["compare", *words])
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


def test_a_side_that_cannot_be_measured_is_named(tmp_path):
    dead = ["--target", "sim", "--target", "http://127.0.0.1:9"]
    words = ["compare", *dead, *TRAFFIC, "--repeats", "1", "--out", str(tmp_path / "c")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, TargetError)
    assert str(result.exception).startswith("B (http://127.0.0.1:9): no run: ")
    assert (tmp_path / "c" / "A" / "r1" / "manifest.json").is_file()


def test_two_targets_that_do_not_answer_leave_no_directory(tmp_path):
    dead = ["--target", "http://127.0.0.1:9"] * 2
    words = ["compare", *dead, *TRAFFIC, "--repeats", "1", "--out", str(tmp_path / "c")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, TargetError)
    assert list(tmp_path.iterdir()) == []


class Interrupting(Console):
    """A console that raises Ctrl-C when the third run begins."""

    def print(self, *objects, **how):
        if str(objects[0]).startswith("[3/"):
            raise KeyboardInterrupt
        super().print(*objects, **how)


def test_an_interrupt_keeps_the_runs_and_names_the_command_that_continues(tmp_path, monkeypatch):
    written = io.StringIO()
    words = ["compare", *SIM, *TRAFFIC, "--repeats", "2", "--out", str(tmp_path / "c")]
    with monkeypatch.context() as patched:
        console = Interrupting(file=written, width=300)
        patched.setattr("loadgen.studies.compare.verb.stderr", lambda: console)
        assert CliRunner().invoke(app, words).exit_code == 130
    where = f"the same command with --out {tmp_path / 'c'} --resume continues"
    assert f"interrupted: 2 of 4 runs are finished; {where}" in written.getvalue()
    assert len(list(tmp_path.glob("c/*/r*/manifest.json"))) == 2
    assert CliRunner().invoke(app, [*words, "--resume"]).exit_code == 0
    assert len(COMPARE.read(tmp_path / "c").measures) > 8


def test_other_settings_are_refused(tmp_path):
    words = ["compare", *SIM, *TRAFFIC, "--repeats", "1", "--out", str(tmp_path / "c")]
    assert CliRunner().invoke(app, words).exit_code == 0
    other = CliRunner().invoke(app, [*words, "--resume", "--seed", "9"])
    assert "holds runs of a cell with another definition" in str(other.exception)
