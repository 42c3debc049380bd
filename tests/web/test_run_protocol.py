"""The protocol of a run, in virtual time: no process, no socket."""

import hashlib
from itertools import permutations

import pytest

from loadgen.errors import RunInvalid, UsageError
from loadgen.records import Status
from loadgen.web.assignment import Assignment
from loadgen.web.control_messages import (
    Assign,
    Died,
    Done,
    Frame,
    Go,
    Got,
    Lease,
    LoadPiece,
    Ping,
    Pong,
    PromptFitMessage,
    Release,
    ShareReady,
    ShareRefused,
    StopShard,
)  # fmt: skip
from loadgen.web.run_protocol import N_PINGS, Controller, Send

SECOND = 1_000_000_000
SHAS = ["a" * 64, "b" * 64]
ROWS = b"rows of a shard"


def given(shard, n_requests=10):
    assign = Assign(
        "run",
        shard,
        2,
        20,
        "scenario",
        "target",
        [],
        {},
        PromptFitMessage(0, 1, 0),
        b"",
        "fast",
        {},
        1,
    )
    return Assignment(assign, [LoadPiece("run", shard, 0, 1, b"")], n_requests, SHAS[shard])


def frame(shard, seq, ok=0, sent=0):
    by_status = [ok, *[0] * (len(Status) - 1)]
    return Frame("run", shard, seq, 1.0, sent, sent, 0, 0, by_status, 0, {}, {})


class Wire:
    """Two workers whose clocks are `offsets_ns` from ours and `rtt_ns` away."""

    def __init__(self, offsets_ns=(0, 0), rtt_ns=2_000_000, **settings):
        self.controller = Controller("run", ["w0", "w1"], [given(0), given(1)], **settings)
        self.offsets_ns, self.rtt_ns, self.now_ns = offsets_ns, rtt_ns, 5 * SECOND
        self.sent = []

    def do(self, sends):
        self.sent += sends
        for send in sends:
            shard = int(send.worker[1])
            if isinstance(send.message, Ping):
                self.now_ns += self.rtt_ns
                clock_ns = send.message.sent_ns + self.rtt_ns // 2 + self.offsets_ns[shard]
                self.say(shard, Pong("run", send.message.sent_ns, clock_ns))

    def say(self, shard, message):
        self.do(self.controller.take(f"w{shard}", message, self.now_ns))

    def meet(self):
        for send in self.controller.start(self.now_ns):  # one worker after the other
            self.do([send._replace(message=Ping("run", self.now_ns))])

    def start(self):
        self.meet()
        for shard in (0, 1):
            self.say(shard, ShareReady("run", shard, SHAS[shard], f"host{shard}", "0.1"))

    def finish(self, shard, rows=ROWS):
        digest = hashlib.sha256(ROWS).hexdigest()
        self.say(shard, Done("run", shard, 1, digest, {"broken": ""}))
        self.say(shard, LoadPiece("run", shard, 0, 1, rows))

    def tick(self, seconds=0.0):
        self.now_ns += round(seconds * SECOND)
        self.do(self.controller.tick(self.now_ns))

    def lost(self):
        return self.controller.must_abort

    def phase(self):
        return self.controller.phase

    def shard(self, number):
        return self.controller.shards[number]

    def of(self, kind):
        return [send for send in self.sent if isinstance(send.message, kind)]


def test_all_start_at_one_instant_each_by_its_own_clock():
    wire = Wire(offsets_ns=(0, 7 * SECOND))
    wire.start()
    assert len(wire.of(Ping)) == 2 * N_PINGS - 2 + 2
    goes = {send.worker: send.message.epoch_ns for send in wire.of(Go)}
    assert goes["w1"] - goes["w0"] == 7 * SECOND
    assert goes["w0"] == wire.controller.epoch_ns > wire.now_ns
    assert [wire.shard(k).skew.bound_s for k in (0, 1)] == [0.001, 0.001]


def test_the_fastest_answer_measures_a_clock():
    wire = Wire()
    controller, rtt_ns = wire.controller, [9, 8, 2, 7, 6, 5, 4, 3]  # of the pings of worker 0
    controller.start(0)
    for n_ns in rtt_ns:
        controller.take("w0", Pong("run", 0, 100 + n_ns // 2), n_ns)
    assert (wire.shard(0).skew.offset_ns, wire.shard(0).skew.rtt_ns) == (100, 2)


def test_the_start_leaves_time_for_several_round_trips():
    wire = Wire(rtt_ns=90_000_000)
    wire.start()
    assert wire.controller.epoch_ns - wire.now_ns == 400_000_000 + 4 * 90_000_000


def test_no_worker_starts_before_all_are_ready():
    wire = Wire()
    wire.meet()
    assert [send.worker for send in wire.of(Assign)] == ["w0", "w1"]
    wire.say(0, ShareReady("run", 0, SHAS[0], "h", "0.1"))
    assert wire.of(Go) == []
    with pytest.raises(RunInvalid, match="worker w1 was not ready in time"):
        wire.tick(61)


def test_rows_of_both_make_the_run_complete():
    wire = Wire()
    wire.start()
    wire.finish(0)
    assert wire.phase() == "running"
    assert [send.worker for send in wire.of(Release)] == ["w0"]
    wire.finish(1)
    assert wire.phase() == "over"
    assert wire.controller.dead == {}
    assert [shard.part for shard in wire.controller.shards] == [ROWS, ROWS]


def test_another_fingerprint_refuses_the_start():
    wire = Wire()
    wire.meet()
    with pytest.raises(RunInvalid, match="would send other requests"):
        wire.say(1, ShareReady("run", 1, SHAS[0], "h", "0.2"))
    assert wire.of(Go) == []


def test_a_refusal_and_a_death_before_the_start_end_the_run():
    for message, error in (
        (ShareRefused("run", 1, "environment variable KEY is not set"), UsageError),
        (Died("run", 1, "exit status 1"), RunInvalid),
    ):
        wire = Wire()
        wire.meet()
        with pytest.raises(error, match=r"worker w1: .*nothing was sent"):
            wire.say(1, message)


def test_clocks_that_are_not_known_well_enough_refuse_the_start():
    wire = Wire(rtt_ns=120_000_000)
    with pytest.raises(RunInvalid, match="± 60 ms"):
        wire.meet()


def test_a_second_frame_of_the_same_number_changes_nothing():
    wire = Wire()
    wire.start()
    wire.say(0, frame(0, 4, ok=3))
    wire.say(0, frame(0, 4, ok=5))
    assert wire.shard(0).frame.by_status[Status.ok] == 3
    wire.say(0, frame(0, 5, ok=6))
    assert wire.shard(0).frame.by_status[Status.ok] == 6


def test_frames_may_be_doubled_late_or_lost():
    for order in permutations([1, 2, 3, 3]):
        wire = Wire()
        wire.start()
        for seq in order:
            wire.say(0, frame(0, seq, ok=seq))
        assert wire.shard(0).frame.by_status[Status.ok] == 3


def test_messages_of_other_workers_and_runs_are_ignored():
    wire = Wire()
    wire.start()
    stranger = wire.controller.take("w7", frame(0, 9, ok=9), wire.now_ns)
    wire.say(1, frame(0, 9, ok=9))
    old = wire.controller.take(
        "w0", Frame("old", 0, 9, 1.0, 0, 0, 0, 0, [9, *[0] * 8], 0, {}, {}), wire.now_ns
    )
    assert (stranger, old) == ([], [])
    assert all(shard.frame is None for shard in wire.controller.shards)
    assert wire.controller.n_bad == 1


def test_a_lost_worker_is_waited_for_and_given_up():
    wire = Wire()
    wire.start()
    wire.controller.gone("w1", wire.now_ns)
    wire.finish(0)
    wire.tick(4.9)
    assert wire.phase() == "running"
    wire.tick(0.2)
    assert wire.phase() == "over"
    assert list(wire.controller.dead) == [1]


def test_a_worker_that_was_lost_and_speaks_again_is_not_lost():
    wire = Wire()
    wire.start()
    wire.controller.gone("w1", wire.now_ns)
    wire.say(1, frame(1, 12, ok=5))
    assert wire.shard(1).state == "running"
    wire.finish(1)
    wire.finish(0)
    assert wire.controller.dead == {}


def test_leases_go_out_each_second_to_those_that_are_not_over():
    wire = Wire()
    wire.start()
    wire.tick(0)
    wire.tick(0.5)
    wire.tick(0.6)
    assert [send.worker for send in wire.of(Lease)] == ["w0", "w1"] * 2
    wire.finish(0)
    wire.tick(1.1)
    assert [send.worker for send in wire.of(Lease)] == [*["w0", "w1"] * 2, "w1"]


def test_rows_that_arrive_damaged_are_not_used():
    wire = Wire()
    wire.start()
    wire.finish(0)
    wire.finish(1, rows=b"rows of a sharc")
    assert wire.phase() == "over"
    assert wire.controller.dead == {1: "its rows were damaged on the way"}


def test_a_stop_goes_to_all_and_a_loss_may_end_the_run():
    wire = Wire(on_loss="abort")
    wire.start()
    assert wire.lost() is None
    wire.say(1, Died("run", 1, "exit status -9"))
    assert wire.lost().number == 1
    wire.do(wire.controller.stop("shard 1 was lost", 0.0))
    assert [send.worker for send in wire.of(StopShard)] == ["w0"]
    assert not wire.of(StopShard)[0].message.sends_waiting
    wire.do(wire.controller.stop("enough requests were released", 30.0, sends_waiting=True))
    assert wire.of(StopShard)[-1].message.sends_waiting


def test_a_lost_worker_whose_last_message_comes_late_is_lost_again():
    wire = Wire()
    wire.start()
    wire.controller.gone("w1", wire.now_ns)
    wire.say(1, frame(1, 3, ok=2))  # was on its way
    wire.finish(0)
    wire.tick(4.9)
    assert wire.phase() == "running"
    wire.tick(0.2)
    assert wire.phase() == "over"
    assert list(wire.controller.dead) == [1]


def test_a_worker_that_is_back_may_be_silent():
    wire = Wire()
    wire.start()
    wire.controller.gone("w1", wire.now_ns)
    wire.controller.back("w1")
    wire.say(1, frame(1, 3, ok=2))
    wire.finish(0)
    wire.tick(30)
    assert wire.phase() == "running"
    assert wire.shard(1).state == "running"


@pytest.mark.parametrize("order", list(permutations(["done", "done", 0, 1])))
def test_rows_and_their_announcement_may_come_in_any_order_and_twice(order):
    wire = Wire()
    wire.start()
    wire.finish(0)
    done = Done("run", 1, 2, hashlib.sha256(ROWS).hexdigest(), {"broken": ""})
    for one in order:
        wire.say(
            1, done if one == "done" else LoadPiece("run", 1, one, 2, (ROWS[:7], ROWS[7:])[one])
        )
    assert wire.controller.dead == {}
    assert wire.shard(1).part == ROWS


def test_a_piece_that_is_not_the_last_is_confirmed():
    wire = Wire()
    wire.start()
    wire.say(0, LoadPiece("run", 0, 0, 2, ROWS[:7]))
    assert wire.sent[-1] == Send("w0", Got("run", 0))


def test_a_doubled_ready_does_not_start_the_run_again():
    wire = Wire()
    wire.start()
    epoch_ns = wire.controller.epoch_ns
    wire.now_ns += SECOND
    for shard in (0, 1):
        wire.say(shard, ShareReady("run", shard, SHAS[shard], "h", "0.1"))
    assert len(wire.of(Go)) == 2
    assert wire.controller.epoch_ns == epoch_ns
