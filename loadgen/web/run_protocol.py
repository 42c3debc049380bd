"""The protocol of a distributed run: shares, the common start, lost workers.

    meeting    ping × 8, to measure the difference of the clocks
    assigning  shares go out; each worker returns the fingerprint of its share
    running    a common epoch, on each worker's own clock; frames come in; leases go out
    over       every shard has sent its rows, died, or been given up

A pure state machine: messages and times go in, messages come out. Before `go`, any failure ends the
run before its first request; after it, the other shards go on and the run reports the lost shard.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.sections import FrameCounts, WorkerSection
from loadgen.web import control_messages as messages
from loadgen.web.assignment import Assignment
from loadgen.web.control_messages import Bad, Frame, PieceAssembler
from loadgen.web.validate import check_frame

N_PINGS = 8
MEETING_S = 20.0
READY_S = 60.0
LEASE_EVERY_S = 1.0
PATIENCE_S = 5.0
"""Time to wait for a lost shard when all others are over."""
_LEAD_S = 0.4  # and some round trips, from GO to the first request
State = Literal["waiting", "ready", "running", "done", "died", "lost"]
Policy = Literal["continue", "abort"]
ABORT = "abort"


class Send(NamedTuple):
    """A message for a worker."""

    worker: str
    message: messages.Down


@dataclass(frozen=True)
class Skew:
    """A worker's monotonic clock minus the control process's, with an uncertainty of ± `rtt_ns` /
    2."""

    offset_ns: int
    rtt_ns: int

    @property
    def bound_s(self) -> float:
        return self.rtt_ns * 0.5e-9


@dataclass
class RemoteShard:
    """The state of a share and its worker."""

    number: int
    worker: str
    n_requests: int
    state: State = "waiting"
    skew: Skew | None = None
    n_pongs: int = 0
    frame: Frame | None = None
    host: str = ""
    note: str = ""
    lost_at_ns: int | None = None
    heard_ns: int = 0
    done: messages.Done | None = None
    rows: PieceAssembler | None = None

    part: bytes = b""

    @property
    def is_over(self) -> bool:
        return self.state in ("died", "done")


@dataclass
class Controller:
    """Controls a run. `workers` are in the order of their shares; `max_skew_s` is the largest
    allowed difference between the starts. Times are nanoseconds of the control process's monotonic
    clock."""

    run: str
    workers: Sequence[str]
    assignments: Sequence[Assignment]
    max_skew_s: float = 0.05
    on_loss: Policy = "continue"
    phase: Literal["meeting", "assigning", "running", "over"] = "meeting"
    epoch_ns: int = 0
    n_bad: int = 0
    shards: list[RemoteShard] = field(default_factory=list)
    _by_worker: dict[str, RemoteShard] = field(default_factory=dict)
    _gone: set[str] = field(default_factory=set)
    _deadline_ns: int = 0
    _lease_ns: int = 0

    def __post_init__(self) -> None:
        pairs = zip(self.workers, self.assignments, strict=True)
        for number, (worker, assignment) in enumerate(pairs):
            shard = RemoteShard(number, worker, assignment.n_requests)
            self.shards.append(shard)
            self._by_worker[worker] = shard

    def start(self, now_ns: int) -> list[Send]:
        self._deadline_ns = now_ns + round(MEETING_S * 1e9)
        return [Send(worker, messages.Ping(self.run, now_ns)) for worker in self.workers]

    def take(self, worker: str, message: messages.Up, now_ns: int) -> list[Send]:
        """Handles a message of a worker. Messages of another run, or of a worker without a share,
        are ignored. Raises RunInvalid or UsageError if the run cannot start."""
        shard = self._by_worker.get(worker)
        if shard is None or message.run != self.run:
            return []
        if not isinstance(message, messages.Pong) and message.shard != shard.number:
            self.n_bad += 1
            return []
        shard.heard_ns = now_ns
        if shard.state == "lost":
            self._recover(shard)
        if shard.is_over:
            return []
        if isinstance(message, messages.Pong):
            return self._on_pong(shard, message, now_ns)
        if isinstance(message, messages.ShareRefused):
            self._abort_start(shard, message.reason, UsageError)
        elif isinstance(message, messages.ShareReady):
            return self._on_ready(shard, message, now_ns)
        elif isinstance(message, Frame):
            self._on_frame(shard, message)
        elif isinstance(message, messages.Done):
            return self._on_done(shard, message, now_ns)
        elif isinstance(message, messages.LoadPiece):
            return self._on_piece(shard, message, now_ns)
        elif isinstance(message, messages.Died):
            self._abort_start(shard, message.words, RunInvalid)
            shard.state, shard.note = "died", message.words
        self._end_if_over(now_ns)
        return []

    def gone(self, worker: str, now_ns: int) -> None:
        """Records that a worker is silent."""
        self._gone.add(worker)
        shard = self._by_worker.get(worker)
        if shard is None or shard.is_over or shard.state == "lost":
            return
        self._abort_start(shard, "its connection is lost", RunInvalid)
        self._lose(shard, now_ns)

    def back(self, worker: str) -> None:
        self._gone.discard(worker)

    def tick(self, now_ns: int) -> list[Send]:
        """Handles the passage of time: leases and timeouts. Raises RunInvalid if the run does not
        start in time."""
        if self.phase in ("meeting", "assigning") and now_ns > self._deadline_ns:
            slow = next(shard for shard in self.shards if self._is_awaited(shard))
            problem = "did not answer" if self.phase == "meeting" else "was not ready"
            raise RunInvalid(f"worker {slow.worker} {problem} in time; nothing was sent")
        self._lose_silent_shards(now_ns)
        self._end_if_over(now_ns)
        if self.phase != "running" or now_ns < self._lease_ns:
            return []
        self._lease_ns = now_ns + round(LEASE_EVERY_S * 1e9)
        return [Send(shard.worker, messages.Lease(self.run)) for shard in self._running()]

    def stop(self, reason: str, drain_s: float, *, sends_waiting: bool = False) -> list[Send]:
        if self.phase != "running":
            return []
        message = messages.StopShard(self.run, drain_s, reason[:2000], sends_waiting)
        return [Send(shard.worker, message) for shard in self._running()]

    def release(self) -> list[Send]:
        """The messages that end the run on every worker."""
        return [Send(worker, messages.Release(self.run)) for worker in self.workers]

    @property
    def must_abort(self) -> RemoteShard | None:
        """The lost shard that ends the run under `--on-worker-loss abort`; else None."""
        if self.on_loss != ABORT:
            return None
        return next((s for s in self.shards if s.state in ("lost", "died")), None)

    @property
    def dead(self) -> dict[int, str]:
        """The shards without rows, and the reason for each."""
        return {s.number: s.note or "it did not end" for s in self.shards if s.state != "done"}

    def worker_sections(self) -> tuple[WorkerSection, ...]:
        """The workers, as the manifest records them."""
        return tuple(
            WorkerSection(
                shard=shard.number,
                worker=shard.worker,
                host=shard.host,
                n_requests=shard.n_requests,
                state=shard.state,
                note=shard.note,
                start_skew_bound_s=shard.skew.bound_s if shard.skew else None,
                last_frame=_counts_of(shard.frame),
            )
            for shard in self.shards
        )

    def _on_pong(self, shard: RemoteShard, pong: messages.Pong, now_ns: int) -> list[Send]:
        rtt_ns = now_ns - pong.sent_ns
        if shard.skew is None or rtt_ns < shard.skew.rtt_ns:
            middle_ns = pong.sent_ns + rtt_ns // 2
            shard.skew = Skew(pong.monotonic_ns - middle_ns, rtt_ns)
        shard.n_pongs += 1
        if shard.n_pongs < N_PINGS:
            return [Send(shard.worker, messages.Ping(self.run, now_ns))]
        if self.phase != "meeting" or any(s.n_pongs < N_PINGS for s in self.shards):
            return []
        for each in self.shards:
            assert each.skew is not None, "a shard that answered has a skew"
            if each.skew.bound_s > self.max_skew_s:
                raise RunInvalid(
                    f"worker {each.worker}: its clock is known to ± {1e3 * each.skew.bound_s:.0f} "
                    f"ms only, limit {1e3 * self.max_skew_s:.0f} ms (--max-skew): the workers "
                    "would not start together; nothing was sent"
                )
        self.phase = "assigning"
        self._deadline_ns = now_ns + round(READY_S * 1e9)
        return list(self._shares())

    def _shares(self) -> Iterator[Send]:
        for worker, assignment in zip(self.workers, self.assignments, strict=True):
            yield Send(worker, assignment.assign)
            yield from (Send(worker, piece) for piece in assignment.rows)

    def _on_ready(self, shard: RemoteShard, ready: messages.ShareReady, now_ns: int) -> list[Send]:
        if self.phase != "assigning" or shard.state != "waiting":
            return []  # repeated
        expected = self.assignments[shard.number].sha256
        if ready.sha256 != expected:
            raise RunInvalid(
                f"worker {shard.worker} (slobench {ready.slobench}) would send other requests: "
                f"SHA-256 {ready.sha256[:12]}…, expected {expected[:12]}…; its code or its files "
                "differ from the master's; nothing was sent"
            )
        shard.state, shard.host = "ready", ready.host
        if any(s.state != "ready" for s in self.shards):
            return []
        slowest_ns = max(s.skew.rtt_ns for s in self.shards if s.skew)
        self.epoch_ns = now_ns + round(_LEAD_S * 1e9) + 4 * slowest_ns
        self.phase, self._lease_ns = "running", now_ns
        for each in self.shards:
            each.state = "running"
        offsets_ns = [(s.worker, s.skew.offset_ns if s.skew else 0) for s in self.shards]
        return [
            Send(worker, messages.Go(self.run, self.epoch_ns + offset_ns))
            for worker, offset_ns in offsets_ns
        ]

    def _on_frame(self, shard: RemoteShard, frame: Frame) -> None:
        if shard.frame is not None and frame.seq <= shard.frame.seq:
            return
        try:
            check_frame(frame, shard.n_requests)
        except Bad as problem:
            self.n_bad += 1
            shard.note = f"a frame was rejected: {problem}"
        else:
            shard.frame = frame

    def _on_piece(self, shard: RemoteShard, piece: messages.LoadPiece, now_ns: int) -> list[Send]:
        """Adds a piece of the rows; it may arrive before the `done` with the number of pieces."""
        try:
            if shard.rows is None:
                shard.rows = PieceAssembler(piece.n)
            shard.rows.add(piece)
        except Bad:
            self.n_bad += 1
        return self._finish_if_complete(shard, now_ns) or [
            Send(shard.worker, messages.Got(self.run, piece.k))
        ]

    def _on_done(self, shard: RemoteShard, done: messages.Done, now_ns: int) -> list[Send]:
        if shard.done is not None:
            return []  # repeated
        shard.done = done
        try:
            if shard.rows is None or shard.rows.n != done.n_pieces:
                shard.rows = PieceAssembler(done.n_pieces)
        except Bad as problem:
            self.n_bad += 1
            shard.state, shard.note = "died", str(problem)
        return self._finish_if_complete(shard, now_ns)

    def _finish_if_complete(self, shard: RemoteShard, now_ns: int) -> list[Send]:
        """Ends a shard whose rows have all arrived or never will."""
        if shard.state != "died":
            if shard.done is None or shard.rows is None or not shard.rows.is_whole:
                return []
            shard.part = shard.rows.data()
            if hashlib.sha256(shard.part).hexdigest() == shard.done.sha256:
                shard.state, shard.note = "done", ""
            else:
                shard.state, shard.note = "died", "its rows were damaged on the way"
        shard.rows = None
        self._end_if_over(now_ns)
        return [Send(shard.worker, messages.Release(self.run))]

    def _lose(self, shard: RemoteShard, since_ns: int) -> None:
        shard.state, shard.lost_at_ns = "lost", since_ns
        shard.note = "its worker is silent"

    def _lose_silent_shards(self, now_ns: int) -> None:
        """Marks as lost the shards of workers that have been silent for PATIENCE_S; messages
        already on the way may still arrive before that."""
        patience_ns = round(PATIENCE_S * 1e9)
        for shard in self.shards:
            is_gone = shard.state == "running" and shard.worker in self._gone
            if is_gone and now_ns > shard.heard_ns + patience_ns:
                self._lose(shard, shard.heard_ns)

    def _recover(self, shard: RemoteShard) -> None:
        shard.state, shard.lost_at_ns, shard.note = "running", None, ""

    def _abort_start(
        self, shard: RemoteShard, reason: str, error: type[RunInvalid] | type[UsageError]
    ) -> None:
        """Before the start, the failure of any shard ends the run."""
        if self.phase in ("meeting", "assigning"):
            raise error(f"worker {shard.worker}: {reason}; nothing was sent")

    def _running(self) -> list[RemoteShard]:
        return [s for s in self.shards if not s.is_over]

    def _is_awaited(self, shard: RemoteShard) -> bool:
        return shard.n_pongs < N_PINGS if self.phase == "meeting" else shard.state != "ready"

    def _end_if_over(self, now_ns: int) -> None:
        if self.phase != "running":
            return
        waiting = [s for s in self.shards if not s.is_over]
        patience_ns = round(PATIENCE_S * 1e9)
        given_up = [
            s for s in waiting if s.lost_at_ns is not None and now_ns > s.lost_at_ns + patience_ns
        ]
        if len(given_up) == len(waiting):
            self.phase = "over"


def _counts_of(frame: Frame | None) -> FrameCounts | None:
    if frame is None:
        return None
    return FrameCounts(frame.now_s, frame.released, frame.sent, tuple(frame.by_status))
