"""The shell around Controller: a pipe with workers that answer at once."""

import hashlib
import io
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from loadgen.archive.store import write_part
from loadgen.drive.shards import CutShort, Outcome
from loadgen.records import CHUNKS, Names, Status, empty_requests
from loadgen.run.recording import Recording
from loadgen.run.run_options import RunOptions, RunSetup
from loadgen.web.assignment import assignments
from loadgen.web.control_messages import (
    Assign,
    Died,
    Done,
    Frame,
    Go,
    LoadPiece,
    Ping,
    Pong,
    ShareReady,
    StopShard,
    encode,
    read_down,
)
from loadgen.web.relay_pipe import FromWorker, RelayPipe, ToWorker
from loadgen.web.remote_fleet import RemoteFleet
from loadgen.workload.schedule import split_plan
from tests.web.test_assignment import job
from tests.web.test_self_report import self_report

WORKERS = ["w0", "w1"]


def part(tmp_path, rows):
    path = tmp_path / "made.npz"
    requests = empty_requests(rows)
    requests["status"] = Status.ok
    write_part(path, requests, np.empty(0, CHUNKS), Names())
    return path.read_bytes()


class Workers(RelayPipe):
    """The line, and behind it two workers on the conductor's own clock. `on_go` says what each
    answers to GO."""

    def __init__(self, shas, on_go):
        self.is_open = True
        self._shas, self._on_go, self._answers = shas, on_go, []
        self.told = []

    def send(self, message):
        if not isinstance(message, ToWorker):
            return
        shard, said = WORKERS.index(message.worker), read_down(message.data)
        self.told.append((shard, said))
        if isinstance(said, Ping):
            self._say(shard, Pong(said.run, said.sent_ns, said.sent_ns))
        elif isinstance(said, Assign):
            self._say(shard, ShareReady(said.run, shard, self._shas[shard], "host", "0.1"))
        elif isinstance(said, (Go, StopShard)):
            for answer in self._on_go(shard, said):
                self._say(shard, answer)

    def _say(self, shard, message):
        self._answers.append(FromWorker(WORKERS[shard], encode(message)))

    def receive(self, wait_s):
        answers, self._answers = self._answers, []
        return answers


def rows_of(shard, data, broken=""):
    digest = hashlib.sha256(data).hexdigest()
    return [Done("a-run", shard, 1, digest, self_report(shard, broken)),
            LoadPiece("a-run", shard, 0, 1, data)]  # fmt: skip


@pytest.fixture
def ran(tmp_path):
    """Runs a fleet of two whose shards answer what `on_go(shard, said, rows)` gives; `rows` is a
    complete part of that shard."""
    asked = replace(job(), parts_dir=tmp_path / "parts")
    asked.parts_dir.mkdir()
    shares = [share.schedule for share in split_plan(asked.plan, 2)]

    def run(on_go, on_loss="continue"):
        shas = [one.sha256 for one in assignments(asked, 2)]
        line = Workers(shas, lambda k, said: on_go(k, said, part(tmp_path, shares[k])))
        fleet = RemoteFleet(line, WORKERS, 1.0, on_loss, tmp_path / "logs")
        nothing = itertools.repeat(None).__next__
        fleet.hand_over(asked)
        outcome = fleet.run(lambda *_: None, lambda _: None, nothing, lambda *_: None)
        return outcome, line

    return run


def test_a_loss_that_ends_the_run_is_reported_once_with_its_time(ran):
    def on_go(shard, said, rows):
        if shard == 1:
            return [Died("a-run", 1, "exit status -9")]
        return rows_of(0, rows) if isinstance(said, StopShard) else []

    outcome, line = ran(on_go, on_loss="abort")
    stops = [said for _, said in line.told if isinstance(said, StopShard)]
    assert len(stops) == 1
    assert outcome.cut_short.reason == "worker w1 was lost (--on-worker-loss abort)"
    assert outcome.dead == {1: "exit status -9"}


def test_a_share_cut_short_on_its_worker_counts_as_died(ran):
    outcome, _ = ran(lambda k, said, rows: rows_of(k, rows, "nobody is there" if k else ""))
    assert outcome.dead == {1: "nobody is there"}
    assert [report.broken for report in outcome.reports] == ["", "nobody is there"]
    assert outcome.cut_short is None


def test_rows_that_cannot_be_used_cost_their_own_share_only(ran, tmp_path):
    outcome, _ = ran(lambda k, said, rows: rows_of(k, rows[:-100] if k else rows))
    assert list(outcome.dead) == [1]
    assert outcome.dead[1].startswith("its rows cannot be read")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["shard-0.npz"]


def test_a_bad_message_is_counted_for_the_manifest(ran):
    def on_go(shard, said, rows):
        return [Frame("a-run", shard, 1, math.nan, 0, 0, 0, 0, [0] * len(Status), 0, {}, {}),
                *rows_of(shard, rows)]  # fmt: skip

    outcome, _ = ran(on_go)
    assert outcome.remote.n_bad == 2
    assert outcome.dead == {}


def test_a_run_that_its_fleet_cut_short_is_recorded_as_stopped(tmp_path):
    asked = job()

    class Fleet:
        pids = None

        def stop(self, reason, drain_s, *, sends_waiting=False):
            raise AssertionError("nobody has to stop what ended by itself")

        def hurry(self, *, is_last):
            raise AssertionError("nobody has to stop what ended by itself")

        def hand_over(self, job):
            assert job.plan is asked.plan

        def run(self, on_beat, on_start, on_idle, on_death):
            on_start(7_000_000_000)
            cut = CutShort("shard 1 was lost", 8_500_000_000)
            return Outcome(7_000_000_000, cut_short=cut)

    console = Console(file=io.StringIO())
    setup = RunSetup(asked.scenario, asked.plan, "mock", RunOptions(), tmp_path, console)
    run = Recording(setup, asked.target, Fleet()).record()
    assert (run.manifest.ended, run.manifest.end_reason) == ("stopped", "shard 1 was lost")
    assert run.manifest.window.ended_s == 1.5
