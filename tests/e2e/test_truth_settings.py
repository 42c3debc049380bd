"""Runs against the truth server in its less obliging moods: rows agree with the server's log."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status, TokenSource
from targets.truth_server import truth_server

pytestmark = pytest.mark.e2e
TOKENS = 20


@pytest.fixture
def measured(cli, tmp_path, truth_cache):
    """`measured(*words, **script)`: a run's exit code, its tables and summary, and the log."""

    def measure(*words, **script):
        script = {"ttft_s": 0.02, "itl_s": 0.004, **script}
        with truth_server(tmp_path, cache_dir=truth_cache, with_tokens=True, **script) as server:
            result = cli(
                "run", f"--target={server.url}", "--rate=60/s", "--duration=1s", "--input-len=16",
                f"--output-len={TOKENS}", "--set=stop_when=never", "--set=phases.drain=60s",
                "--out=run", *cli.lenient, *words, cwd=tmp_path,
            )  # fmt: skip
            log = server.finish()
        assert result.returncode in (0, 1), result.stdout + result.stderr
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        run = read_run(tmp_path / "run")
        assert len(run.request_rows) == len(run.schedule_rows) == summary["counts"]["scheduled"]
        return run, summary, log

    return measure


def instants(run, log):
    """Rows that ended well, what the log has of them, and the run's epoch, s."""
    rows = run.request_rows[run.request_rows["status"] == Status.ok]
    return rows, log.rows_of(rows["request_id"]), run.manifest.epoch_s


def assert_causal(run, log):
    """Nothing is stamped before the server wrote it, and something within 50 ms after, which is
    less than an answer takes; how true stamps are is the doctor's to prove."""
    rows, truth, epoch_s = instants(run, log)
    for ours, theirs in (("first_token_s", "first_ns"), ("last_token_s", "last_ns")):
        after_s = rows[ours] + epoch_s - truth[theirs] * 1e-9
        assert after_s.min() >= -1e-6, ours  # float64 seconds of a clock that is hours old
        assert after_s.min() < 0.05, ours
    assert (rows["sent_s"] + epoch_s <= truth["arrived_ns"] * 1e-9 + 1e-6).all()
    return rows, truth


@pytest.mark.parametrize(
    "script",
    [
        {},
        {"burst": 7, "role": "early", "usage_delay_s": 0.1},
        {"burst": 3, "tokens_per_event": 3, "role": "off", "finish": "merged"},
        {"split_bytes": 13, "usage": "off", "done": "off"},
        {"ttft_s": 0.0, "itl_s": 0.0, "requests_per_connection": 3},
    ],
    ids=lambda script: " ".join(script) or "plain",
)
def test_every_row_agrees_with_the_servers_log(measured, script):
    run, _, log = measured(**script)
    rows, truth = assert_causal(run, log)
    assert len(rows) == len(run.schedule_rows)
    assert (truth["sent_tokens"] == TOKENS).all()
    assert (rows["output_tokens"] == TOKENS).all()
    assert (rows["token_source"] == TokenSource.usage).all()  # per chunk, where not at the end
    per_event = script.get("tokens_per_event", 1)
    assert (rows["chunks"] == -(-TOKENS // per_event)).all()
    sums = np.bincount(run.chunk_rows["request_id"], run.chunk_rows["tokens"])
    assert (sums[rows["request_id"]] == TOKENS).all()
    if delay_s := script.get("usage_delay_s"):
        late_s = rows["done_s"] - rows["last_token_s"]
        assert late_s.max() > delay_s - 0.03  # a token stamped late makes it shorter
    if not script.get("split_bytes"):  # of a burst every token has the instant of its write
        order = np.lexsort((run.chunk_rows["received_s"], run.chunk_rows["request_id"]))
        received_s = run.chunk_rows["received_s"][order].reshape(len(rows), -1)
        written_ns = np.array([log.tokens_ns(row)[::per_event] for row in truth])
        ahead_s = written_ns * 1e-9 - run.manifest.epoch_s - received_s
        assert ahead_s.max() < 1e-6


@pytest.mark.parametrize("burst", [1, 32], ids=["a write each", "all in one write"])
def test_failures_of_every_kind_are_the_servers_own_count(measured, burst):
    run, summary, log = measured(
        "--set=limits.timeout=2s", burst=burst,
        fail=("503:0.15", "429:0.1", "cut:0.1", "inband:0.1", "hang:0.05"),
        reset=0.1, refuse=0.1, seed=3,
    )  # fmt: skip
    rows = run.request_rows
    is_logged = np.isin(rows["request_id"], log.rows["seq"])
    # A connection that the server reset before it read a request: no row of its own. The client
    # sees the reset while it sends or after it.
    unseen = {Status(each).name for each in rows["status"][~is_logged].tolist()}
    assert unseen <= {"connect_error", "stream_error"}
    assert (rows["status"][is_logged] != Status.connect_error).all()
    seen, status = log.rows_of(rows["request_id"][is_logged]), rows["status"][is_logged]
    expected = {
        "ok": Status.ok, "503": Status.http_error, "429": Status.http_error,
        "cut": Status.stream_error, "inband": Status.stream_error, "hang": Status.timeout,
        "aborted": Status.timeout,
    }  # fmt: skip
    told = [expected[outcome] for outcome in seen["outcome"].tolist()]
    assert status.tolist() == told
    assert sum(summary["counts"][each.name] for each in Status) == summary["counts"]["due"]
    assert {Status.ok, Status.http_error, Status.stream_error} <= set(told)
    assert_causal(run, log)


def test_two_workers_rows_are_the_servers_rows_once_each(measured):
    run, _, log = measured("--workers=2")
    rows, truth = assert_causal(run, log)
    seqs = log.rows["seq"][log.rows["seq"] >= 0]
    assert np.array_equal(np.sort(seqs), run.schedule_rows["request_id"])
    assert np.array_equal(run.request_rows["request_id"], run.schedule_rows["request_id"])
    assert (rows["status"] == Status.ok).all()
    assert (truth["sent_tokens"] == rows["output_tokens"]).all()
    counts = np.bincount(rows["shard"], minlength=2)
    assert abs(int(counts[0]) - int(counts[1])) <= 1
    ids, n_chunks = np.unique(run.chunk_rows["request_id"], return_counts=True)
    assert np.array_equal(ids, rows["request_id"])
    assert (n_chunks == TOKENS).all()
    assert len(run.instrument["shards"]) == 2


@pytest.mark.alone
def test_a_busy_loop_on_the_clients_core_is_invalid_and_named(cli, tmp_path, truth_cache):
    """However soon the kernel lets the client in, the core is never idle."""
    loop = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(1, flush=True)\n"
    loop += "while True: pass"
    with truth_server(tmp_path, cache_dir=truth_cache) as server:
        core = str(max(server.client_cpus))
        busy = subprocess.Popen([sys.executable, "-c", loop, core], stdout=subprocess.PIPE)
        try:
            assert busy.stdout is not None
            assert busy.stdout.read(1) == b"1"
            pinned = f"import os, sys; os.sched_setaffinity(0, {{{core}}});"
            pinned += "os.execv(sys.executable, [sys.executable, '-m', 'loadgen', *sys.argv[1:]])"
            result = subprocess.run(
                [sys.executable, "-c", pinned, "run", f"--target={server.url}", "--rate=40/s",
                 "--duration=2s", "--input-len=16", f"--output-len={TOKENS}", "--out=run"],
                cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=90,
                check=False,
            )  # fmt: skip
        finally:
            busy.kill()
            busy.communicate()
    shards = read_run(tmp_path / "run").instrument["shards"]
    if any(shard.get("throttled_share") for shard in shards):
        pytest.skip("a CPU quota stopped the loop, too, and so its core was idle")
    assert result.returncode == 3, result.stdout + result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["verdict"], summary["validity"]["trusted"]) == ("no_verdict", False)
    (reason,) = summary["reasons"]
    assert "The load generator's own delays are too large a part of the measured values" in reason
    assert re.search(r"Cause: other programs used [\d.]+ % of the time of its core", reason)
    assert "Remedy: stop the other programs" in reason
    shared = next(c for c in summary["validity"]["checks"] if c["name"] == "shared cores")
    assert re.search(r" [\d.]+ % was idle", shared["detail"])
    assert "another program kept its core busy all the time" in shared["detail"]
    assert "INVALID" in result.stdout
