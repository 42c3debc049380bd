"""The two transports in whole runs: one schedule, one script, the same ledger row by row."""

import json

import numpy as np
import pytest

from loadgen.archive.store import read_run
from tests.e2e.test_run import truth

pytestmark = pytest.mark.e2e

FLAGS = ("--rate=60/s", "--input-len=64", "--output-len=8", "--duration=2s", "--seed=5")


def test_both_transports_record_the_same_run(cli, tmp_path):
    """What fails is decided by each request's number. First tokens are held against the server's
    own log of that run, the one that was stamped best: a busy machine makes others late."""
    script = "--engine=ttft=20ms,itl=2ms,fail=500:10%,fail=cut:10%,fail=inband:10%,seed=3"
    for transport in ("fast", "aiohttp"):
        result = cli(
            "run", "--target=mock", script, *FLAGS, f"--transport={transport}", *cli.lenient,
            f"--out={transport}", cwd=tmp_path,
        )  # fmt: skip
        assert result.returncode in (0, 1), result.stderr
    fast, plain = (read_run(tmp_path / transport) for transport in ("fast", "aiohttp"))
    assert (fast.manifest.transport, plain.manifest.transport) == ("fast", "aiohttp")
    assert fast.manifest.schedule_sha256 == plain.manifest.schedule_sha256
    one, other = fast.request_rows, plain.request_rows
    assert len(set(one["status"])) == 3
    for column in (
        "request_id", "status", "http_status", "output_tokens", "chunks", "input_tokens",
        "finish_reason", "token_source", "first_chunk_tokens", "bytes",
    ):  # fmt: skip
        assert (one[column] == other[column]).all(), column
    assert (fast.chunk_rows["tokens"] == plain.chunk_rows["tokens"]).all()
    for run in (fast, plain):
        rows = run.request_rows[np.isfinite(run.request_rows["first_token_s"])]
        said = truth(tmp_path / str(run.manifest.transport))
        written_ns = np.array([int(said[row]["first_ns"]) for row in rows["request_id"].tolist()])
        after_s = rows["first_token_s"] + run.manifest.epoch_s - written_ns * 1e-9
        assert -1e-6 <= after_s.min() < 0.010
        assert (rows["first_token_s"] - rows["sent_s"]).min() >= 0.020


@pytest.mark.parametrize("transport", ["fast", "aiohttp"])
def test_a_run_reaches_a_server_on_a_socket_file(cli, tmp_path, transport):
    result = cli(
        "run", "--target=mock", "--engine=ttft=5ms,itl=1ms,unix=s.sock", "--rate=40/s",
        "--input-len=20", "--output-len=4", "--duration=1s", f"--transport={transport}",
        *cli.lenient, "--json", "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["counts"]["ok"] == summary["counts"]["due"] > 20
    run = read_run(tmp_path / "run")
    assert run.manifest.target.url == "unix:s.sock"
    assert set(run.names.remotes) == {"", "s.sock"}


def test_a_transport_nobody_knows_is_refused(cli, tmp_path):
    result = cli("run", "--target=mock", *FLAGS, "--transport=fats", cwd=tmp_path)
    assert result.returncode == 2
    assert "--transport fats: did you mean 'fast'?" in result.stderr
