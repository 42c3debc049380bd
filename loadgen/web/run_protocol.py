"""The conduct of one distributed run: who does which share, when all start, who is lost.

    meeting    ping × 8, for the difference of the clocks
    assigning  shares go out; each worker answers with the fingerprint of what it understood
    running    one epoch for all, in each worker's own clock; frames come in; leases go out
    over       every shard's rows are here, or it died, or it is given up

A pure state machine: messages and instants go in, messages come out. Until `go` any trouble ends
the run before its first request; after it, a shard that is lost is told and the others go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest import FrameCounts, WorkerSection
from loadgen.web.assignment import Assignment
from loadgen.web.control_messages import (
    Bad,
    Died,
    Done,
    Down,
    Frame,
    Go,
    Got,
    Lease,
    LoadPiece,
    PieceAssembler,
    Ping,
    Pong,
    Release,
    ShareReady,
    ShareRefused,
    StopShard,
    Up,
)
from loadgen.web.validate import check_frame

N_PINGS = 8
MEETING_S = 20.0
READY_S = 60.0
LEASE_EVERY_S = 1.0
PATIENCE_S = 5.0
"""How long a lost shard is waited for when all others are over."""
_LEAD_S = 0.4  # and some round trips, from GO to the first request
State = Literal["waiting", "ready", "running", "done", "died", "lost"]
Policy = Literal["continue", "abort"]
ABORT = "abort"


class Send(NamedTuple):
    """A message for a worker."""

    worker: str
    message: Down


@dataclass(frozen=True)
class Skew:
    """A worker's monotonic clock minus the conductor's, known to within ± half of `rtt_ns`."""

    offset_ns: int
    rtt_ns: int

    @property
    def bound_s(self) -> float:
        return self.rtt_ns * 0.5e-9


@dataclass
class RemoteShard:
    """What is known of one share and the worker that has it."""

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
    done: Done | None = None
    rows: PieceAssembler | None = None

    part: bytes = b""

    @property
    def is_over(self) -> bool:
        return self.state in ("died", "done")


@dataclass
class Controller:
    """`workers` in the order of their shares. `max_skew_s` is the most by which the starts may be
    apart. Instants are nanoseconds of the conductor's monotonic clock."""

    run: str
    workers: Sequence[str]
    given: Sequence[Assignment]
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
        for number, (worker, given) in enumerate(zip(self.workers, self.given, strict=True)):
            shard = RemoteShard(number, worker, given.n_requests)
            self.shards.append(shard)
            self._by_worker[worker] = shard

    def start(self, now_ns: int) -> list[Send]:
        self._deadline_ns = now_ns + round(MEETING_S * 1e9)
        return [Send(worker, Ping(self.run, now_ns)) for worker in self.workers]

    def take(self, worker: str, message: Up, now_ns: int) -> list[Send]:
        """A message of a worker's. One of another run, or of a worker without a share, means
        nothing. Raises RunInvalid or UsageError where the run cannot start."""
        shard = self._by_worker.get(worker)
        if shard is None or message.run != self.run:
            return []
        if not isinstance(message, Pong) and message.shard != shard.number:
            self.n_bad += 1
            return []
        shard.heard_ns = now_ns
        if shard.state == "lost":
            self._found_again(shard)
        if shard.is_over:
            return []
        if isinstance(message, Pong):
            return self._met(shard, message, now_ns)
        if isinstance(message, ShareRefused):
            self._withdraw(shard, message.reason, UsageError)
        elif isinstance(message, ShareReady):
            return self._readied(shard, message, now_ns)
        elif isinstance(message, Frame):
            self._counted(shard, message)
        elif isinstance(message, Done):
            return self._done(shard, message, now_ns)
        elif isinstance(message, LoadPiece):
            return self._piece(shard, message, now_ns)
        elif isinstance(message, Died):
            self._withdraw(shard, message.words, RunInvalid)
            shard.state, shard.note = "died", message.words
        self._look_whether_over(now_ns)
        return []

    def gone(self, worker: str, now_ns: int) -> None:
        """Nothing is heard of a worker any more."""
        self._gone.add(worker)
        shard = self._by_worker.get(worker)
        if shard is None or shard.is_over or shard.state == "lost":
            return
        self._withdraw(shard, "its worker is gone", RunInvalid)
        self._lose(shard, now_ns)

    def back(self, worker: str) -> None:
        self._gone.discard(worker)

    def tick(self, now_ns: int) -> list[Send]:
        """What time alone brings: leases, and patience that ends. Raises RunInvalid when the run
        could not start in time."""
        if self.phase in ("meeting", "assigning") and now_ns > self._deadline_ns:
            slow = next(shard for shard in self.shards if self._is_awaited(shard))
            what = "did not answer" if self.phase == "meeting" else "was not ready"
            raise RunInvalid(f"worker {slow.worker} {what} in time; nothing was sent")
        self._lose_the_silent(now_ns)
        self._look_whether_over(now_ns)
        if self.phase != "running" or now_ns < self._lease_ns:
            return []
        self._lease_ns = now_ns + round(LEASE_EVERY_S * 1e9)
        return [Send(shard.worker, Lease(self.run)) for shard in self._running()]

    def stop(self, reason: str, drain_s: float) -> list[Send]:
        if self.phase != "running":
            return []
        return [
            Send(s.worker, StopShard(self.run, drain_s, reason[:2000])) for s in self._running()
        ]

    def release(self) -> list[Send]:
        """What ends the run for everybody, however it went."""
        return [Send(worker, Release(self.run)) for worker in self.workers]

    @property
    def must_abort(self) -> RemoteShard | None:
        """The lost shard that ends the run, where losing one does."""
        if self.on_loss != ABORT:
            return None
        return next((s for s in self.shards if s.state in ("lost", "died")), None)

    @property
    def dead(self) -> dict[int, str]:
        """The shards whose rows are not here, and why."""
        return {s.number: s.note or "it never ended" for s in self.shards if s.state != "done"}

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

    def _met(self, shard: RemoteShard, pong: Pong, now_ns: int) -> list[Send]:
        rtt_ns = now_ns - pong.sent_ns
        if shard.skew is None or rtt_ns < shard.skew.rtt_ns:
            middle_ns = pong.sent_ns + rtt_ns // 2
            shard.skew = Skew(pong.monotonic_ns - middle_ns, rtt_ns)
        shard.n_pongs += 1
        if shard.n_pongs < N_PINGS:
            return [Send(shard.worker, Ping(self.run, now_ns))]
        if self.phase != "meeting" or any(s.n_pongs < N_PINGS for s in self.shards):
            return []
        for one in self.shards:
            assert one.skew is not None, "a shard that answered has a skew"
            if one.skew.bound_s > self.max_skew_s:
                raise RunInvalid(
                    f"worker {one.worker}: its clock is known to ± {one.skew.bound_s * 1e3:.0f} ms "
                    f"only, so the shards would not start together (limit "
                    f"{self.max_skew_s * 1e3:.0f} ms: --max-skew); nothing was sent"
                )
        self.phase = "assigning"
        self._deadline_ns = now_ns + round(READY_S * 1e9)
        return list(self._shares())

    def _shares(self) -> Iterator[Send]:
        for worker, given in zip(self.workers, self.given, strict=True):
            yield Send(worker, given.assign)
            yield from (Send(worker, piece) for piece in given.rows)

    def _readied(self, shard: RemoteShard, ready: ShareReady, now_ns: int) -> list[Send]:
        if self.phase != "assigning" or shard.state != "waiting":
            return []  # said twice
        expected = self.given[shard.number].sha256
        if ready.sha256 != expected:
            raise RunInvalid(
                f"worker {shard.worker} (slobench {ready.slobench}) understands its share "
                f"otherwise: SHA-256 {ready.sha256[:12]}…, expected {expected[:12]}…; its code or "
                "its files differ from ours; nothing was sent"
            )
        shard.state, shard.host = "ready", ready.host
        if any(s.state != "ready" for s in self.shards):
            return []
        slowest_ns = max(s.skew.rtt_ns for s in self.shards if s.skew)
        self.epoch_ns = now_ns + round(_LEAD_S * 1e9) + 4 * slowest_ns
        self.phase, self._lease_ns = "running", now_ns
        for one in self.shards:
            one.state = "running"
        return [
            Send(s.worker, Go(self.run, self.epoch_ns + (s.skew.offset_ns if s.skew else 0)))
            for s in self.shards
        ]

    def _counted(self, shard: RemoteShard, frame: Frame) -> None:
        if shard.frame is not None and frame.seq <= shard.frame.seq:
            return
        try:
            check_frame(frame, shard.n_requests)
        except Bad as problem:
            self.n_bad += 1
            shard.note = f"a frame of it is not used: {problem}"
        else:
            shard.frame = frame

    def _piece(self, shard: RemoteShard, piece: LoadPiece, now_ns: int) -> list[Send]:
        """A part of the rows; it may come before the `done` that says how many there are."""
        try:
            if shard.rows is None:
                shard.rows = PieceAssembler(piece.n)
            shard.rows.add(piece)
        except Bad:
            self.n_bad += 1
        return self._collected(shard, now_ns) or [Send(shard.worker, Got(self.run, piece.k))]

    def _done(self, shard: RemoteShard, done: Done, now_ns: int) -> list[Send]:
        if shard.done is not None:
            return []  # said twice
        shard.done = done
        try:
            if shard.rows is None or shard.rows.n != done.n_pieces:
                shard.rows = PieceAssembler(done.n_pieces)
        except Bad as problem:
            self.n_bad += 1
            shard.state, shard.note = "died", str(problem)
        return self._collected(shard, now_ns)

    def _collected(self, shard: RemoteShard, now_ns: int) -> list[Send]:
        """The end of a shard whose rows are all here, or never will be."""
        if shard.state != "died":
            if shard.done is None or shard.rows is None or not shard.rows.is_whole:
                return []
            shard.part = shard.rows.data()
            if hashlib.sha256(shard.part).hexdigest() == shard.done.sha256:
                shard.state, shard.note = "done", ""
            else:
                shard.state, shard.note = "died", "its rows arrived damaged"
        shard.rows = None
        self._look_whether_over(now_ns)
        return [Send(shard.worker, Release(self.run))]

    def _lose(self, shard: RemoteShard, since_ns: int) -> None:
        shard.state, shard.lost_at_ns = "lost", since_ns
        shard.note = "nothing is heard of its worker"

    def _lose_the_silent(self, now_ns: int) -> None:
        """A worker that is gone may still be heard, of what was on its way; not for long."""
        patience_ns = round(PATIENCE_S * 1e9)
        for shard in self.shards:
            is_gone = shard.state == "running" and shard.worker in self._gone
            if is_gone and now_ns > shard.heard_ns + patience_ns:
                self._lose(shard, shard.heard_ns)

    def _found_again(self, shard: RemoteShard) -> None:
        shard.state, shard.lost_at_ns, shard.note = "running", None, ""

    def _withdraw(
        self, shard: RemoteShard, why: str, kind: type[RunInvalid] | type[UsageError]
    ) -> None:
        """Before the start, whatever befalls a shard ends the run."""
        if self.phase in ("meeting", "assigning"):
            raise kind(f"worker {shard.worker}: {why}; nothing was sent")

    def _running(self) -> list[RemoteShard]:
        return [s for s in self.shards if not s.is_over]

    def _is_awaited(self, shard: RemoteShard) -> bool:
        return shard.n_pongs < N_PINGS if self.phase == "meeting" else shard.state != "ready"

    def _look_whether_over(self, now_ns: int) -> None:
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
