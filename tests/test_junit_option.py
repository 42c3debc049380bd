"""`--junit` is written on every exit, not only after a run."""

import os
import signal
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from loadgen.cli import exit_codes
from loadgen.cli.app import app
from loadgen.errors import RunInvalid

SIM = "run quickstart --target sim --duration 2s --rate 2 --engine shape=8b,hardware=h200"


def ended(path, *words):
    """(exit code, test cases of the file)."""
    code = exit_codes.guarded(lambda: app([*words]), {}, words)
    return code, cases(path)


def cases(path):
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None
    found = [
        (case.get("name"), child.tag, child.get("type"), child.get("message") or "")
        for case in suite
        for child in case
    ]
    assert suite.get("tests") == str(len(suite.findall("testcase")))
    return found


@pytest.mark.parametrize(
    ("line", "code", "kind", "words"),
    [
        ("run no_such_scenario --target mock", 2, "usage", "no such file and no shipped scenario"),
        ("run --no-such-flag", 2, "usage", "the command line is wrong"),
        ("run quickstart", 2, "usage", "no target"),
    ],
)
def test_an_error_before_the_run_is_a_test_case_with_the_message(
    tmp_path, monkeypatch, line, code, kind, words
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    path = tmp_path / "new" / "junit.xml"
    found, [(name, tag, type_, message)] = ended(path, *line.split(), f"--junit={path}")
    assert (found, name, tag, type_) == (code, "run", "error", kind)
    assert words in message


def test_a_server_that_is_down_is_a_test_case(tmp_path):
    path = tmp_path / "junit.xml"
    words = ["run", "quickstart", "--target", "http://127.0.0.1:1", "--junit", str(path)]
    done = subprocess.run([sys.executable, "-m", "loadgen", *words], cwd=tmp_path, check=False)
    assert done.returncode == 3
    [(_, tag, type_, message)] = cases(path)
    assert (tag, type_) == ("error", "no_verdict")
    assert "connection refused" in message


def test_a_run_writes_its_own_cases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "junit.xml"
    path.write_text("<testsuites/>")
    code, found = ended(path, *SIM.split(), "--slo", "p50(e2e)<=1h", "--junit", str(path))
    assert code in (0, 3)
    assert [name for name, *_ in found if "p50" in name]


def test_a_file_of_an_earlier_run_does_not_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "junit.xml"
    path.write_text("<testsuites/>")
    assert ended(path, "run", "nowhere", "--junit", str(path))[1][0][1] == "error"


@pytest.mark.parametrize(
    ("error", "code", "kind", "words"),
    [
        (RunInvalid("a worker died"), 3, "no_verdict", "a worker died"),
        (OSError(28, "No space left on device", "runs/x"), 3, "no_verdict", "runs/x: No space"),
        (SystemExit(130), 130, "interrupted", "interrupted"),
        (RuntimeError("a bug"), 4, "internal", "RuntimeError: a bug"),
        (SystemExit(0), 0, None, "no run was made"),
    ],
)
def test_every_other_end_is_a_test_case_too(tmp_path, error, code, kind, words):
    path = tmp_path / "junit.xml"

    def body():
        raise error

    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert exit_codes.guarded(body, environ, ["run", "--junit", str(path)]) == code
    [(_, tag, type_, message)] = cases(path)
    assert (tag, type_) == ("error" if kind else "skipped", kind)
    assert words in message


def test_an_interrupted_run_writes_it(tmp_path):
    path = tmp_path / "junit.xml"
    words = ["run", "quickstart", "--target", "mock", "--duration", "600s", "--junit"]
    run = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *words, str(path)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stderr is not None
    try:
        for line in run.stderr or ():
            if line.startswith("sending"):
                break
        os.kill(run.pid, signal.SIGINT)
        run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130
    assert cases(path)
