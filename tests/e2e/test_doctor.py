"""`slobench doctor`: this machine and the proof as processes, servers and mistakes in this one."""

import json
import sys

import pytest
import typer
from rich.console import Console

from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.doctor import verb
from loadgen.studies.doctor.run import check_server
from loadgen.studies.doctor.trial import TrialSetup, measure_trial

pytestmark = pytest.mark.e2e


def doctor(cli, cwd, *words, **environ):
    """(facts, stderr) of a visit that found this machine fit or not: it may be busy."""
    result = cli("doctor", "--json", "--budget=1s", *words, cwd=cwd, environ=environ)
    assert result.returncode in (0, 3), result.stderr
    facts = json.loads(result.stdout)
    assert facts["exit_code"] == result.returncode
    assert facts["is_fit"] is (result.returncode == 0) is not bool(facts["reasons"])
    return facts, result.stderr


@pytest.mark.alone
def test_this_machine_has_a_ceiling_or_a_reason(cli, tmp_path, truth_cache):
    facts, told = doctor(cli, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert {"cores", "timer", "open files"} <= {check["check"] for check in facts["checks"]}
    (trial,) = facts["trials"]  # one is made whatever the budget
    assert trial["rate_per_s"] == 100
    assert trial["ttft_error_s"]["n"] > 100
    assert facts["judge"] == "truth"
    assert "100 req/s: p99 of the TTFT error" in told
    kept = tmp_path / "cache" / "slobench" / "ceiling.json"
    assert kept.exists() is (facts["is_fit"] and not facts["notes"])
    if kept.exists():
        assert facts["ceiling"]["file"] == str(kept)
        assert json.loads(kept.read_text())["events_per_s_per_core"] == pytest.approx(
            facts["ceiling"]["tokens_per_s"], abs=0.1
        )


@pytest.mark.alone
def test_the_proof_holds_a_run_against_the_servers_own_log(cli, tmp_path, truth_cache):
    facts, _ = doctor(cli, tmp_path, "--prove")
    trial = facts["trials"][0]
    assert trial["rate_per_s"] == 20
    assert facts["notes"][0] == "no time left to try 100, 400 req/s"
    for name in ("ttft_error_s", "tpot_error_s", "lateness_s", "server_lateness_s"):
        assert trial[name]["n"] > 5
    # A reading can be late, by as much as the machine is busy, but never early.
    assert 0 < trial["ttft_error_s"]["p50"] < 0.5


def test_without_a_compiler_the_proof_is_refused(cli, tmp_path):
    (tmp_path / "bin").mkdir()
    alone = {"PATH": str(tmp_path / "bin"), "CC": ""}
    result = cli("doctor", "--prove", cwd=tmp_path, environ=alone)
    assert (result.returncode, result.stdout) == (2, "")
    assert "install gcc" in result.stderr


def test_without_a_compiler_the_mock_judges(tmp_path):
    trial = measure_trial(TrialSetup(tmp_path, judge="mock"), 20.0, 0.5, 0)
    assert trial.fidelity.ttft_error_s.n > 5
    assert 0 < trial.fidelity.ttft_error_s.p50 < 0.5


def test_a_server_of_ours_can_be_measured():
    options = RunOptions(engine="mode=chunked,shape=nano,device=toy")
    facts = check_server("reference", options, Console(quiet=True))
    assert facts.exit_code == 0
    checks = {check.check: check for check in facts.checks}
    assert "present: 1984 of 2000 prompt tokens cached" in checks["prefix_cache"].detail
    assert checks["max_model_len"].detail == "4096 tokens"
    assert len(checks) == len(facts.checks) == 15


def test_no_server_is_a_reason(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slobench"])
    with pytest.raises(typer.Exit) as end:
        verb.doctor(target="http://127.0.0.1:9")
    out = capsys.readouterr().out
    assert end.value.exit_code == 3
    assert out.startswith("NOT FIT FOR MEASURING\n  http://127.0.0.1:9: connection refused")
    assert out.count("not checked") == 1
    assert "14 more" in out
    assert out.count("→") == 1, "a check that was left out has no consequence"


@pytest.mark.parametrize(
    ("target", "prove", "budget", "model", "says"),
    [
        ("mock", True, "60s", "", "choose one"),
        (None, False, "60s", "m", "need --target"),
        (None, False, "60x", "", "--budget: '60x' is not a duration"),
        (None, True, "1ms", "", "expected 1s to 1h"),
        ("refrence", False, "60s", "", "did you mean 'reference'"),
    ],
)
def test_a_mistake_is_reported(target, prove, budget, model, says):
    with pytest.raises(UsageError, match=says):
        verb.doctor(target=target, prove=prove, budget=budget, model=model, json=True)
