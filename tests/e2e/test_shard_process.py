"""The controlling process's view of one load-generating process, also of one started early."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loadgen.drive.prefork import may_fork
from loadgen.drive.shard_process import PreforkedShard, ShardProcess
from loadgen.drive.shards import Shards
from loadgen.errors import RunInvalid

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="no process is started early elsewhere, and `/proc` is Linux'",
    ),
]
CUT_SHORT = "loadgen.drive.shard: the task on stdin is incomplete"


def children():
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def taken(early):
    process = early.take()
    assert process is not None
    return process


def hand_half_a_task(process):
    os.write(process.stdin.fileno(), (100).to_bytes(8, "big") + b"half")
    process.stdin.close()


def test_an_early_process_is_given_away_once_and_then_belongs_to_the_taker():
    with PreforkedShard(is_enabled=True) as early:
        process = taken(early)
        assert early.take() is None
    assert str(process.pid) in children()
    process.end()
    assert str(process.pid) not in children()


def test_an_early_process_that_nobody_took_is_gone():
    before = children()
    with PreforkedShard(is_enabled=True):
        assert len(children() - before) == 1
    assert children() == before


def test_none_is_started_that_is_not_wanted():
    with PreforkedShard(is_enabled=False) as early:
        assert early.take() is None


def test_what_an_early_process_says_is_kept_where_its_log_belongs(tmp_path):
    with PreforkedShard(is_enabled=True) as early:
        process = taken(early)
        process.keep_log(tmp_path / "logs" / "shard-0.log")
        hand_half_a_task(process)
        assert process.exit_report() == f"exit status 1; {CUT_SHORT}"
        process.end()
    assert (tmp_path / "logs" / "shard-0.log").read_text().strip() == CUT_SHORT


def test_a_process_with_a_log_of_its_own_writes_there_at_once(tmp_path):
    log = tmp_path / "logs" / "shard-1.log"
    process = ShardProcess.logging_to(log)
    hand_half_a_task(process)
    assert process.exit_report() == f"exit status 1; {CUT_SHORT}"
    assert log.read_text().strip() == CUT_SHORT
    process.end()


LINES = b"a line of this log\n" * (3 << 16)  # 3.6 MiB


def test_the_last_words_are_the_end_of_a_long_log_which_is_kept_whole(tmp_path):
    log_fd = os.memfd_create("log")
    process = ShardProcess(log_fd)
    process.keep_log(tmp_path / "shard-0.log")
    os.write(log_fd, LINES)  # at the offset that both share
    hand_half_a_task(process)
    last_words = process.exit_report()
    process.end()
    assert last_words == f"exit status 1; {CUT_SHORT}"
    kept = (tmp_path / "shard-0.log").read_bytes()
    assert kept.startswith(LINES)
    assert kept[len(LINES) :].decode().strip() == CUT_SHORT


def test_all_processes_end_although_the_log_of_one_cannot_be_kept(tmp_path):
    before = children()
    log = tmp_path / "logs" / "shard-0.log"

    def lose_a_log():
        with PreforkedShard(is_enabled=True) as early, Shards(3, log.parent, preforked=early):
            assert len(children() - before) == 3
            log.unlink()
            log.mkdir()

    with pytest.raises(IsADirectoryError):
        lose_a_log()
    assert children() == before


def test_an_early_process_ends_where_its_log_has_no_place(tmp_path):
    before = children()
    logs = tmp_path / "logs"
    logs.touch()
    with (
        pytest.raises(FileExistsError),
        PreforkedShard(is_enabled=True) as early,
        Shards(1, logs, preforked=early),
    ):
        pass
    assert children() == before


def test_processes_that_have_started_lack_nothing_but_their_tasks(tmp_path):
    with Shards(2, tmp_path) as shards:
        shards.await_started()
        for pid in shards.pids:
            assert "uvloop" in Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.timeout(30)  # one that is slow has a minute
def test_a_process_that_dies_before_it_has_started_is_told_at_once(tmp_path):
    with Shards(2, tmp_path) as shards:
        os.kill(shards.pids[1], signal.SIGKILL)
        with pytest.raises(RunInvalid, match="worker 1 died at its start: ended by SIGKILL"):
            shards.await_started()


MAIN = """
import os, signal, sys
from pathlib import Path

from loadgen.drive.prefork import ForkedShard
from loadgen.drive.shard_process import PreforkedShard


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def original():
    with PreforkedShard(forks=True) as early:
        process = early.take()
        print(command(process.pid) == command("self"))
        number = int(sys.argv[1])
        if number:
            os.kill(process.pid, number)
        if number != signal.SIGKILL:
            process.stdin.close()
        print(process.exit_report())
        process.end()


forked = None
try:
    original()
except ForkedShard as copy:
    forked = copy
if forked is not None:
    from loadgen.drive import shard

    with forked as progress_fd:
        shard.main(progress_fd)
"""


def preforked(number):
    """(whether the process was a copy, its last words) after a signal, or after its input ended."""
    command = [sys.executable, "-P", "-c", MAIN, str(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stderr == ""
    is_copy, last_words = ended.stdout.splitlines()
    return is_copy, last_words


def test_a_preforked_process_is_a_copy_of_the_command_and_ends_with_its_input():
    assert preforked(0) == ("True", "exit status 0; nothing in its log")


@pytest.fixture
def thread():
    """One that waits, beside the main thread."""
    go_on = threading.Event()
    waiting = threading.Thread(target=go_on.wait, daemon=True)
    waiting.start()
    yield
    go_on.set()
    waiting.join()


@pytest.mark.usefixtures("thread")
def test_a_process_with_threads_is_not_copied_and_gets_a_new_one():
    assert not may_fork()
    with PreforkedShard(forks=True) as early:
        process = taken(early)
        process.stdin.close()
        assert process.exit_report() == "exit status 0; nothing in its log"
        process.end()


def test_a_copy_that_is_killed_writes_nothing_else():
    assert preforked(signal.SIGKILL) == ("True", "ended by SIGKILL; nothing in its log")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_copy_leaves_other_signals_to_the_command(number):
    assert preforked(number) == ("True", "exit status 0; nothing in its log")
