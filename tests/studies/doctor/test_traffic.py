"""`slobench doctor` with the flags of a traffic: can this machine, or this server, carry it?"""

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import UsageError
from loadgen.studies.doctor import verb
from loadgen.studies.doctor.run import DOCTOR, check_traffic, longest_lengths
from loadgen.studies.doctor.view import tables
from loadgen.workload.scenario import scenario_from_flags

LENGTHS: dict[str, Any] = {"input_len": 32, "output_len": 8, "duration": "60s"}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("load", "least", "most"),
    [({"rate": "40/s"}, 20.0, 65.0), ({"concurrency": 4}, 15.0, 4 / 0.12)],
)
def test_a_traffic_is_sent_to_a_server_on_this_machine(load, least, most, page_cache):
    """4 in flight against answers of 50 ms + 7 × 10 ms: at most 33.3 requests per second."""
    scenario = scenario_from_flags(**load, **LENGTHS)
    checkup = check_traffic(scenario, 4.5, page_cache, "")
    (trial,) = checkup.trials
    assert (checkup.kind, checkup.output_tokens) == ("traffic", 8)
    assert least <= trial.rate_per_s <= most
    assert trial.n_requests <= trial.rate_per_s * 1.5 + 0.7 * trial.rate_per_s + 4
    assert not [problem for problem in trial.problems if "requests ended as" in problem]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(tables(checkup))
    assert "workers as for a run, at most 8 tokens each" in console.export_text()


def test_the_longest_lengths_are_those_of_the_schedule():
    lengths = {"kind": "uniform", "min": 5, "max": 5}
    scenario = scenario_from_flags(rate="50/s", input_len=lengths, output_len=9, duration="2s")
    assert longest_lengths(scenario) == (5, 9)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rate", "8", "--target", "mock"], "--rate: with --target, doctor sends single"),
        (["--input-len", "8"], "the traffic has no load: add --rate N or --concurrency N"),
        (["--prove", "--rate", "8"], "--prove has rates and lengths of its own"),
    ],
)
def test_flags_without_a_meaning_here_are_refused(words, problem):
    result = CliRunner().invoke(app, ["doctor", *words])
    assert isinstance(result.exception, UsageError)
    assert problem in str(result.exception)


@pytest.mark.e2e
def test_the_lengths_of_the_flags_are_compared_with_the_servers_limit():
    words = ["doctor", "--target", "mock", "--engine", "max_model_len=300", "--json"]
    fits = CliRunner().invoke(app, [*words, "--input-len", "200", "--output-len", "50"])
    too_long = CliRunner().invoke(app, [*words, "--input-len", "400", "--output-len", "50"])
    assert (fits.exit_code, too_long.exit_code) == (0, 3)
    assert "400 + 50 tokens" in " ".join(json.loads(too_long.stdout)["reasons"])


@pytest.mark.e2e
def test_a_kept_trial_is_not_repeated_with_resume(tmp_path):
    out = tmp_path / "d"

    def check(*more, rate="20"):
        words = ["doctor", "--rate", rate, "--output-len", "8", "--budget", "4s", "--json"]
        return CliRunner().invoke(app, [*words, "--out", str(out), *more])

    first = check()
    assert first.exit_code in (0, 3), first.output
    assert f"result: {out / 'doctor.json'}" in first.stderr
    content = json.loads(first.stdout)
    assert DOCTOR.read(out).to_json() == content == json.loads((out / "doctor.json").read_text())
    assert "add --resume to continue it" in str(check().exception)
    assert "traffic.arrivals.rate" in str(check("--resume", rate="30").exception)
    again = json.loads(check("--resume").stdout)
    assert again["trials"] == content["trials"], "the wall time included"
    (stored,) = out.glob("trials/*/trial.json")
    stored.write_text("{")
    assert f"{stored}: damaged: it does not match" in str(check("--resume").exception)


def test_an_interrupted_check_names_the_command_that_continues(tmp_path):
    written = io.StringIO()

    def interrupted():
        flags = verb._Directory(out=tmp_path / "d")
        with verb._directory(flags, {}, Console(file=written, width=300)) as place:
            assert place is not None
            place.write_text("trials", "kept")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert written.getvalue() == (
        f"interrupted: the finished trials are kept; the same command with --out {tmp_path / 'd'} "
        "--resume continues\n"
    )


def test_nothing_is_kept_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with verb._directory(verb._Directory(), {}, Console(quiet=True)) as place:
        assert place is None
    assert list(tmp_path.iterdir()) == []
