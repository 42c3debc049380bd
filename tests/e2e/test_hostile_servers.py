"""Servers, and a machine, that do their worst to a run: every scheduled request has its row, and
what can be known of it is right."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.archive.store import read_run
from loadgen.records import Status
from targets.embed import mock
from tests.e2e.hostile import CANNED_TOKENS, TOKENS, Hostile

pytestmark = pytest.mark.e2e


def flags(rate, seconds, *more):
    return [
        f"--rate={rate}", f"--duration={seconds}", "--input-len=16", f"--output-len={TOKENS}",
        "--set=arrivals.kind=constant", "--set=stop_when=never", "--set=phases.drain=5s",
        "--out=run", *more,
    ]  # fmt: skip


def accounted(directory):
    """The run, once its rows are seen to sum to the schedule in the tables and in the summary."""
    run = read_run(directory)
    counts = json.loads((directory / "summary.json").read_text())["counts"]
    n = len(run.schedule_rows)
    assert len(run.request_rows) == n == counts["scheduled"]
    assert sum(counts[status.name] for status in Status) == counts["due"]
    assert counts["due"] + counts["warmup"] + counts["withdrawn"] + counts["not_due"] == n
    return run


def error_of(run, row):
    return run.names.errors[row["error_id"]]


def test_tokens_that_the_quick_search_misses_do_not_end_the_run(cli, tmp_path):
    with Hostile(lambda number: "spaced") as server:
        result = cli(
            "run", f"--target={server.url}", *flags("40/s", "1s"), "--slo=ttft<=1s",
            *cli.lenient, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 0, result.stderr
    run = accounted(tmp_path / "run")
    assert run.manifest.ended == "completed"
    assert len(run.request_rows) >= 40
    assert (run.request_rows["status"] == Status.ok).all()
    assert (run.request_rows["output_tokens"] == TOKENS).all()


@pytest.mark.faults
def test_a_canned_answer_of_another_model_has_no_verdict_and_says_why(cli, tmp_path):
    with Hostile(lambda number: "canned") as server:
        result = cli(
            "run", f"--target={server.url}", *flags("20/s", "1s"), f"--output-len={CANNED_TOKENS}",
            "--slo=ttft<=60s", *cli.lenient, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 3, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    n = summary["counts"]["ok"]
    assert n >= 20
    notes = " ".join(result.stdout.split())
    model = f"{n} of {n} answers state the model 'small', not 'm', which was requested."
    assert f"note {model}" in notes
    assert any(finding.startswith(model) for finding in summary["findings"])
    assert summary["reason_kinds"] == ["wrong_answers"]
    text = f"{n} of {n} answers have the same text, although their prompts differ"
    assert text in notes
    assert summary["reasons"][0].startswith(text)


def test_errors_inside_answers_that_are_all_alike_end_the_run_without_a_verdict(cli, tmp_path):
    with Hostile(lambda number: "broken") as server:
        result = cli(
            "run", f"--target={server.url}", *flags("20/s", "30s"), "--slo=ttft<=1s",
            *cli.lenient, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 3, result.stderr
    run = accounted(tmp_path / "run")
    assert (run.manifest.ended, run.manifest.end_kind) == ("stopped", "refused")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["verdict"], summary["cause"]["kind"]) == ("no_verdict", "failed_alike")
    assert 'with an error inside the answer: "Unexpected token".' in summary["reasons"][0]
    status = run.request_rows["status"]
    assert np.count_nonzero(status == Status.stream_error) >= 10
    assert np.count_nonzero(status == Status.not_released) > 400


def test_a_prompt_that_is_refused_for_its_length_is_named_by_file_and_line(cli, tmp_path):
    lines = [json.dumps({"prompt": f"question {k}", "output_tokens": TOKENS}) for k in range(5)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    with Hostile(lambda number: "too_long" if number % 5 in (1, 3) else "well") as server:
        result = cli(
            "run", f"--target={server.url}", "--rate=20/s", "--duration=1s",
            "--set=arrivals.kind=constant", "--dataset=data.jsonl", "--slo=ttft<=1s", "--out=run",
            *cli.lenient, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 1, result.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["cause"]["kind"] == "too_long"
    sent = [int(re.findall(rb"question (\d)", server.bodies[number])[0]) for number in (1, 3)]
    places = [f"data.jsonl:{k + 1}" for k in sent]
    assert summary["cause"]["places"] == places
    assert (
        f"8 of 20 requests are longer than the server accepts ({places[0]}, {places[1]}), "
        'HTTP 400: "maximum context length is 64 tokens".' in summary["reasons"][0]
    )


def test_a_run_whose_requests_are_all_refused_ends_at_once_without_a_verdict(cli, tmp_path):
    with Hostile(lambda number: "refused") as server:
        result = cli(
            "run", f"--target={server.url}", *flags("20/s", "60s"), "--slo=ttft<=1s",
            *cli.lenient, cwd=tmp_path,
        )  # fmt: skip
    assert result.returncode == 3, result.stderr
    run = accounted(tmp_path / "run")
    assert run.manifest.ended == "stopped"
    assert run.manifest.window.ended_s < 2.0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["verdict"] == "no_verdict"
    words = "the run's requests are refused; the preflight's were not: HTTP 400: this id is refused"
    assert words in run.manifest.end_reason
    assert 'failed alike with HTTP 400: "this id is refused".' in summary["reasons"][0]
    assert words in (tmp_path / "run" / "report.html").read_text().replace("&#39;", "'")


KINDS = ("well", "cut", "reset", "bytewise", "burst", "role_first", "role_only", "late_usage")


def test_each_way_of_answering_is_told_for_what_it_is(cli, tmp_path):
    # the last few make others go on that wait for arrivals
    kind_of = [KINDS[number % len(KINDS)] if number < 36 else "well" for number in range(40)]
    with Hostile(lambda number: kind_of[number]) as server:
        result = cli(
            "run", f"--target={server.url}", *flags("40/s", "1s"), *cli.lenient, cwd=tmp_path
        )
    assert result.returncode in (0, 1), result.stderr
    run = accounted(tmp_path / "run")
    rows: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for row in run.request_rows:
        rows[kind_of[row["request_id"]]].append(row)
    for kind in ("well", "bytewise", "burst", "role_first", "late_usage"):
        assert {Status(row["status"]) for row in rows[kind]} == {Status.ok}, kind
    for kind, words in (
        ("cut", "in the middle of the response"),
        ("reset", ""),
        ("role_only", "without a single token"),
    ):
        assert {Status(row["status"]) for row in rows[kind]} == {Status.stream_error}, kind
        assert all(words in error_of(run, row) for row in rows[kind]), kind
    assert {int(row["chunks"]) for row in rows["cut"]} == {1}
    for kind in ("well", "burst", "late_usage"):
        assert {int(row["output_tokens"]) for row in rows[kind]} == {TOKENS}, kind
    for row in rows["burst"]:  # one read brought them all
        assert row["first_token_s"] == row["last_token_s"]
    epoch_s = run.manifest.epoch_s
    for before, after, kind in (
        ("first_chunk_s", "first_token_s", "role_first"),
        ("last_token_s", "done_s", "late_usage"),
    ):  # what came before the second write was stamped before it, what it brought after it
        for row in rows[kind]:
            written_s = server.written_ns[row["request_id"]] * 1e-9 - epoch_s
            assert row[before] < written_s < row[after], kind


def test_one_in_ten_connections_refused_is_one_in_ten_failures(cli, tmp_path):
    """Reset instead of answered, each on a connection of its own, by the request's number."""
    target = tmp_path / "t.yaml"
    with Hostile(lambda number: "reset" if number % 10 == 3 else "burst") as server:
        target.write_text(f"url: {server.url}\nconnections: never\n")
        result = cli("run", f"--target={target}", *flags("60/s", "1s"), *cli.lenient, cwd=tmp_path)
    assert result.returncode in (0, 1), result.stderr
    run = accounted(tmp_path / "run")
    failed = run.request_rows["status"] != Status.ok
    assert (failed == (run.request_rows["request_id"] % 10 == 3)).all()


def test_a_line_of_50_MB_is_read_within_bounds(cli, tmp_path):
    """It is a token like any other; the memory of the largest process stays below 600 MB."""
    watch = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, done.returncode)"
    )
    with Hostile(lambda number: "long_line" if number == 2 else "burst") as server:
        command = ["run", f"--target={server.url}", *flags("5/s", "1s"), *cli.lenient]
        command.append("--set=phases.drain=60s")  # as long as it takes to be written and read
        done = subprocess.run(
            [sys.executable, "-c", watch, sys.executable, "-m", "loadgen", *command],
            cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=90, check=True,
        )  # fmt: skip
    peak_kb, code = map(int, done.stdout.split()[-2:])
    assert code in (0, 1, 3), done.stderr
    assert peak_kb < 600_000
    run = accounted(tmp_path / "run")
    assert (run.request_rows["status"] == Status.ok).all()
    assert run.request_rows["bytes"].max() > 50 << 20
    assert int(run.request_rows["chunks"][run.request_rows["bytes"].argmax()]) == 2


def started(cli, cwd, *args):
    process = subprocess.Popen(
        [sys.executable, "-m", "loadgen", *args],
        cwd=cwd, env=cli.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr or ():
        if line.startswith("sending "):
            return process
    raise AssertionError("it ended before it sent anything")


def still_running(process, seconds):
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(seconds)


def test_a_stopped_server_shows_in_p99_from_the_release(cli, tmp_path):
    with mock({"ttft": "5ms", "itl": "1ms"}, tmp_path) as served:
        process = started(
            cli, tmp_path, "run", f"--target={served.endpoint.url}", *flags("60/s", "2s"),
            *cli.lenient, "--set=limits.max_concurrency=2", "--set=limits.when_full=wait",
        )  # fmt: skip
        try:
            still_running(process, 0.8)
            os.kill(served.child.process.pid, signal.SIGSTOP)
            still_running(process, 2.0)
            os.kill(served.child.process.pid, signal.SIGCONT)
            _, stderr = process.communicate(timeout=60)
        finally:
            served.child.process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
    assert process.returncode in (0, 1, 3), stderr
    run = accounted(tmp_path / "run")
    assert (run.request_rows["status"] == Status.ok).all()
    metrics = json.loads((tmp_path / "run" / "summary.json").read_text())["metrics"]
    assert metrics["ttft_s"]["percentiles"]["p99"]["value"] > 1.8
    waited_s = run.request_rows["first_token_s"] - run.request_rows["sent_s"]
    assert np.count_nonzero(waited_s > 0.5) <= 4  # the two on their way, and a neighbour each


def test_a_killed_worker_is_noticed_at_once_and_costs_only_its_rows(cli, tmp_path):
    with Hostile(lambda number: "well") as server:
        process = started(
            cli, tmp_path, "run", f"--target={server.url}", *flags("60/s", "4s"),
            *cli.lenient, "--workers=2",
        )  # fmt: skip
        try:
            server.await_arrivals(40)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children}
            own = Path(f"/proc/{process.pid}/cmdline").read_text()  # the first one's, too: a copy
            shards = [int(p) for p, c in commands.items() if c == own or "loadgen.drive.shard" in c]
            assert len(shards) == 2
            os.kill(shards[0], signal.SIGKILL)
            said = next(line for line in process.stderr if "died" in line)
            assert process.poll() is None, "told only when the run was over"
            assert "worker 0 died" in said or "worker 1 died" in said
            _, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 3, stderr
    run = accounted(tmp_path / "run")
    lost = run.request_rows["status"] == Status.lost
    (dead,) = {0, 1} - set(run.request_rows["shard"][~lost].tolist())
    assert (run.request_rows["status"][~lost] == Status.ok).all()
    assert np.count_nonzero(lost) == pytest.approx(len(lost) / 2, abs=1)
    assert f"worker {dead} died" in run.manifest.end_reason
