"""Mistakes of a user: an exit code and one line with the mistake, its place and the remedy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
QUICK = ["--rate=5/s", "--input-len=8", "--output-len=4", "--duration=1s"]
LONG = ["--rate=5/s", "--input-len=400", "--output-len=4", "--duration=1s"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "quickstrat", "--target=mock"], 2, "did you mean 'quickstart'"),
        (["run", "quickstart"], 2, "--target"),
        (["run", "--target=mock", "--rate=5"], 2, "add --input-len, --output-len"),
        (["run", *QUICK, "--target=refrence"], 2, "did you mean 'reference'"),
        (["run", *QUICK, "--target=ftp://x"], 2, "neither http nor https"),
        (["run", *QUICK, "--target=localhost:8000"], 2, "no scheme"),
        (["run", *QUICK, "--target=http://127.0.0.1:9"], 3, "refused"),
        (["run", *QUICK, "--target=mock", "--engine=tfft=1ms"], 2, "did you mean 'ttft'"),
        (["run", *QUICK, "--target=reference", "--engine=shape=huge,device=toy"], 2, "huge"),
        (["run", *QUICK, "--target=mock", "--workers=many"], 2, "--workers many"),
        (["run", *QUICK, "--target=mock", "--confidence=30"], 2, "--confidence"),
        (["run", *QUICK, "--target=mock", "--slo=tftt<=1s"], 2, "did you mean 'ttft'"),
        (["run", *QUICK, "--target=mock", "--set=arrivals.rate=-3/s"], 2, "must be positive"),
        (["run", *QUICK, "--target=mock", "--plugin=nowhere.py"], 2, "no such Python file"),
        (["run", *QUICK, "--target=mock", "--engine=fail=401:100%"], 3, "401"),
        (["run", *QUICK, "--target=mock", "--engine=fail=notsse:100%"], 3, "event stream"),
        (["run", *LONG, "--target=mock", "--engine=max_model_len=300"], 3, "--max-model-len"),
        (["report", "nowhere"], 2, "no such run or search"),
        (["run", *QUICK, "--target=mock", "--out=/dev/null/x"], 2, "cannot be made"),
        (["list", "arival"], 2, "did you mean 'arrivals'"),
        (["serve", "--device=toy", "--port=99999"], 2, "--port"),
    ],
)
def test_a_mistake_is_one_line(cli, tmp_path, arguments, code, words):
    result = cli(*arguments, cwd=tmp_path)
    assert result.returncode == code, result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("slobench: ")]
    assert len(errors) == 1, result.stderr
    assert words in errors[0]
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


def test_a_mistake_in_a_scenario_file_is_named_by_line_and_key(cli, tmp_path):
    (tmp_path / "bad.yaml").write_text("name: bad\narrivals: {kind: poison, rate: 8/s}\n")
    result = cli("preview", "bad.yaml", cwd=tmp_path)
    assert result.returncode == 2
    assert "bad.yaml:2: arrivals.kind" in result.stderr
    assert "did you mean 'poisson'" in result.stderr


def test_flags_print_as_a_scenario_that_previews_the_same(cli, tmp_path):
    text = cli("run", *QUICK, "--slo=p99(ttft)<=1s", "--print-scenario", cwd=tmp_path).stdout
    (tmp_path / "saved.yaml").write_text(text)
    facts = json.loads(cli("preview", "saved.yaml", "--json", cwd=tmp_path).stdout)
    direct = json.loads(cli("preview", *QUICK, "--json", cwd=tmp_path).stdout)
    assert facts["schedule_sha256"] == direct["schedule_sha256"]
    assert facts["slo"][0]["text"] == "p99(ttft)<=1s"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list", "--json"]])
def test_help_and_lists_need_no_network_and_exit_0(cli, tmp_path, arguments):
    result = cli.fresh(*arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_version_is_the_installed_one(cli, tmp_path):
    assert cli.fresh("--version", cwd=tmp_path).stdout == "slobench 0.1.0\n"


def test_an_internal_error_is_one_line_and_a_file(tmp_path, capsys):
    from loadgen.cli.exit_codes import guarded

    def body():
        raise RuntimeError("a bug\nof two lines")

    assert guarded(body, {"XDG_CACHE_HOME": str(tmp_path)}) == 4
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "slobench: internal error: RuntimeError: a bug"
    (kept,) = (tmp_path / "slobench").iterdir()
    assert str(kept) in lines[1]
    assert "Traceback" in kept.read_text()


@pytest.mark.faults
def test_a_full_disk_is_an_error():
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this platform")
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "loadgen", "list", "lengths"], stdout=full,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        3,
        "slobench: standard output: No space left on device\n",
    )
