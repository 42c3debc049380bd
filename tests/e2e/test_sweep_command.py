"""`slobench sweep` as a user meets it: interrupted and gone on with, on real servers, with its exit
codes."""

import json
import signal
import subprocess
import sys

import pytest

from tests.waits import wait_until

pytestmark = pytest.mark.e2e
SWEEP = (
    "sweep", "quickstart", "--target=reference", "--engine=device=toy,shape=nano",
    "--over=rate=6/s,12/s", "--repeats=1",
    "--duration=3s", "--warmup=0s", "--set=phases.drain=5s",
)  # fmt: skip


def test_an_interrupted_sweep_is_resumed(cli, tmp_path):
    sweep = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *SWEEP, *cli.lenient, "--out=s"],
        cwd=tmp_path, env=cli.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    order = json.loads(
        cli(*SWEEP, *cli.lenient, "--out=s", "--dry-run", "--json", cwd=tmp_path).stdout
    )["turns"]
    first, second = (tmp_path / "s" / turn["cell"] / f"r{turn['repeat']}" for turn in order[:2])
    try:
        wait_until((first / "report.html").exists, 60, "no first report")
        wait_until((second / "manifest.json").exists, 60, "no second manifest")
        # A run that ends before its first request leaves no directory.
        assert sweep.stderr is not None
        sending = (line for line in sweep.stderr if line.startswith("sending "))
        next(sending), next(sending)
        sweep.send_signal(signal.SIGINT)
        out, err = sweep.communicate(timeout=60)
    finally:
        sweep.kill()
        sweep.wait()
    assert sweep.returncode == 130
    assert "slobench sweep --out s --resume continues" in err
    assert "only 1 of 2 runs are finished" in " ".join(out.split())
    kept = (first / "requests.parquet").stat().st_mtime_ns
    again = cli("sweep", "--out=s", "--resume", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    facts = json.loads(again.stdout)
    assert (facts["n_done"], facts["n_runs"]) == (2, 2)
    assert (first / "requests.parquet").stat().st_mtime_ns == kept
    assert (tmp_path / "s" / order[1]["cell"] / "unfinished" / "r1").is_dir()
    assert all(row["measures"]["error_rate"]["value"] == 0 for row in facts["rows"])
    assert (tmp_path / "s" / "report.html").is_file()
    assert len(list((tmp_path / "s" / "servers").iterdir())) == 2  # one each time


def test_the_exit_code_follows_the_flag(cli, tmp_path):
    words = (
        "sweep", "quickstart", "--target=mock", "--engine=ttft=300ms,itl=1ms", "--repeats=1",
        "--duration=1s", "--warmup=0s", *cli.lenient,
    )  # fmt: skip
    over = "--over=slo=[ttft <= 100ms],[ttft <= 30s]"
    missed = cli(*words, over, "--out=m", "--fail-on=missed", cwd=tmp_path)
    assert missed.returncode == 1, missed.stderr
    assert cli(*words, over, "--out=m", "--resume", cwd=tmp_path).returncode == 0
    failed = cli(*words, "--over=engine.ttft=20ms,never", "--out=f", "--json", cwd=tmp_path)
    assert failed.returncode == 3, failed.stderr
    facts = json.loads(failed.stdout)
    assert [len(row["failures"]) for row in facts["rows"]] == [0, 1]
    assert "ttft" in facts["rows"][1]["failures"][0]["reason"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstart", "--over=rate=2/s"], "no target: add --target"),
        (["quickstart", "--target=sim"], "name a key to vary"),
        (["quickstart", "--target=sim", "--over=rate=2/s", "--fail-on=mist"], "'missed'"),
        (["--resume"], "name the directory of the study with --out"),
        (["--out=nowhere", "--resume"], "nowhere holds no sweep"),
        (
            ["quickstart", "--target=reference", "--over=engine.mode=chunkd"],
            "did you mean 'chunked'",
        ),
    ],
)
def test_a_mistake_is_a_line_and_exit_code_2(cli, tmp_path, words, message):
    result = cli("sweep", *words, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []
