"""The controlling process's view of one load-generating process, also of one started early."""

import os
import sys
from pathlib import Path

import pytest

from loadgen.drive.shard_process import EarlyShard, ShardProcess

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere none is started early, and `/proc` is Linux'"
)
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
    with EarlyShard(is_wanted=True) as early:
        process = taken(early)
        assert early.take() is None
    assert str(process.pid) in children()
    process.end()
    assert str(process.pid) not in children()


def test_an_early_process_that_nobody_took_is_gone():
    before = children()
    with EarlyShard(is_wanted=True):
        assert len(children() - before) == 1
    assert children() == before


def test_none_is_started_that_is_not_wanted():
    with EarlyShard(is_wanted=False) as early:
        assert early.take() is None


def test_what_an_early_process_says_is_kept_where_its_log_belongs(tmp_path):
    with EarlyShard(is_wanted=True) as early:
        process = taken(early)
        process.keep_log(tmp_path / "logs" / "shard-0.log")
        hand_half_a_task(process)
        assert process.last_words() == f"exit status 1; {CUT_SHORT}"
        process.end()
    assert (tmp_path / "logs" / "shard-0.log").read_text().strip() == CUT_SHORT


def test_a_process_with_a_log_of_its_own_writes_there_at_once(tmp_path):
    log = tmp_path / "logs" / "shard-1.log"
    process = ShardProcess.logging_to(log)
    hand_half_a_task(process)
    assert process.last_words() == f"exit status 1; {CUT_SHORT}"
    assert log.read_text().strip() == CUT_SHORT
    process.end()
