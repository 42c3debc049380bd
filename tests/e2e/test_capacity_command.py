"""`slobench capacity` as a user meets it: the simulator, a live server, Ctrl-C and going on."""

import json
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.e2e

QUICK = (
    "--set=requests.input_tokens=64",
    "--set=requests.output_tokens=8",
    "--set=phases.warmup=1s",
    "--set=phases.measure=8s",
    "--attainment=90%",
)


def test_the_simulator_has_a_capacity(cli, tmp_path):
    result = cli(
        "capacity", "capacity_search", "--target=sim", "--between=4/s:16/s", "--budget=12s",
        *QUICK, "--json", "--out=found", cwd=tmp_path,
    )  # fmt: skip
    answer = json.loads(result.stdout)
    assert answer["exit_code"] == result.returncode == 3, result.stderr  # never missed at 16/s
    assert answer["low"] >= 4.0
    assert answer["unit"] == "req/s"
    assert (tmp_path / "found" / "report.html").exists()


def test_a_live_server_that_misses_at_every_rate_exits_1(cli, tmp_path):
    """Answers begin after 400 ms, and the limit is 200 ms."""
    result = cli(
        "capacity", "capacity_search", "--target=mock", "--engine=ttft=400ms,itl=1ms",
        "--between=10/s:20/s", "--slo=ttft<=200ms", *QUICK, *cli.lenient, "--out=found",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith("CAPACITY below 10 req/s: the SLO is missed even there")
    kept = json.loads((tmp_path / "found" / "capacity.json").read_text())["probes"]
    decisive = [probe for probe in kept if probe["grade"] != "untrusted"]  # a stall of the machine
    assert decisive
    assert {probe["grade"] for probe in decisive} == {"saturated"}
    assert all(probe["measured_s"] < 8.0 for probe in decisive)  # ended early


def test_ctrl_c_keeps_the_probes_and_resume_goes_on(cli, tmp_path):
    words = (
        "capacity", "capacity_search", "--target=mock", "--engine=ttft=400ms,itl=1ms",
        "--between=10/s:40/s", "--slo=ttft<=200ms", *QUICK, *cli.lenient, "--out=found",
    )  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-m", "loadgen", *words],
        cwd=tmp_path, env=cli.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as searching:  # fmt: skip
        assert searching.stderr is not None
        deadline_s = time.monotonic() + 80
        for line in searching.stderr:
            if line.startswith("probe 2") or time.monotonic() > deadline_s:
                searching.send_signal(signal.SIGINT)
                break
        _, err = searching.communicate(timeout=80)
    assert searching.returncode == 130, err
    assert "--resume continues" in err
    kept = json.loads((tmp_path / "found" / "capacity.json").read_text())
    assert kept["answer"]["is_interrupted"]
    assert len(kept["probes"]) == 1
    result = cli(*words, "--resume", cwd=tmp_path)
    assert result.returncode == 1, result.stderr
    later = json.loads((tmp_path / "found" / "capacity.json").read_text())
    assert later["probes"][0] == kept["probes"][0]
    assert len(later["probes"]) > 1


def test_mistakes_are_told_before_anything_runs(cli, tmp_path):
    for words, said in (
        (("--target=mock", "--between=9/s:2/s"), "must be lower than the second"),
        (("--target=mock", "--over=users"), "--over users"),
        (("--target=mock", "--resume"), "name the directory of the study with --out"),
        (("--target=mock", "--over=concurrency"), "open loop"),
        (("--target=mock", "--precision=90%"), "--precision 90%: expected"),
    ):
        result = cli("capacity", "capacity_search", *words, cwd=tmp_path)
        assert (result.returncode, said in result.stderr) == (2, True), result.stderr
