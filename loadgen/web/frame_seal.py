"""The seal on frames between Locust's master and workers: a shared secret proves their origin.

    frame   MARK · HMAC-SHA256 (32 bytes) · counter (8 bytes) · Locust's message
    notice  NOTICE · a reason (1 byte)

The HMAC covers the direction, the worker's identity, the counter and the message, and is checked
before the message is parsed. Counters of a sender only grow, so a recorded frame is refused when it
is repeated. MARK begins with a byte that MessagePack never uses: no message of Locust begins so.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable

from loadgen.web.control_messages import MAX_BYTES

MOST_FRAME_BYTES = MAX_BYTES + (64 << 10)
"""A longer frame is refused before memory is taken for it: the longest message of a run, and
Locust's envelope around it."""
UP, DOWN = b"up", b"down"

MARK = b"\xc1slo1"
NOTICE = b"\xc1sloN"
_TAG, _COUNTER = 32, 8
_HEAD = len(MARK) + _TAG + _COUNTER

MISSING, DIFFERENT, UNEXPECTED = b"m", b"d", b"u"
NOTICES = {
    MISSING: "the master requires the worker secret: start this worker with --worker-secret-env",
    DIFFERENT: "the master has another worker secret: --worker-secret-env must name a variable "
    "with the same value on both sides",
    UNEXPECTED: "the master has no worker secret: start slobench web with --worker-secret-env, or "
    "this worker without it",
}
"""For a worker that the master refuses: the text by the reason of a notice."""


class BadFrame(ValueError):
    """Raised for a frame that is not a message of this run's master or worker. `notice` is the
    reason byte to return to a worker, empty for none."""

    def __init__(self, text: str, notice: bytes = b"") -> None:
        super().__init__(text)
        self.notice = notice


class Sealer:
    """Seals the frames of a sender. `start` is the first counter: the time in ns, so that a
    sender that starts again continues above its earlier frames."""

    def __init__(self, secret: bytes | None, direction: bytes, start: int) -> None:
        self._secret, self._direction, self._counter = secret, direction, start

    def seal(self, identity: bytes, message: bytes) -> bytes:
        """The frame of a message from or to the worker `identity`."""
        if self._secret is None:
            return message
        self._counter += 1
        counter = self._counter.to_bytes(_COUNTER, "big")
        tag = _tag(self._secret, self._direction, identity, counter, message)
        return MARK + tag + counter + message


class Opener:
    """Checks and opens the frames of senders, each with its own counter."""

    def __init__(self, secret: bytes | None, direction: bytes) -> None:
        self._secret, self._direction = secret, direction
        self._counters: dict[bytes, int] = {}

    def open(self, identity: bytes, frame: bytes) -> bytes:
        """The message in a frame. Raises BadFrame."""
        if len(frame) > MOST_FRAME_BYTES:
            raise BadFrame(f"a frame of {len(frame)} bytes, limit {MOST_FRAME_BYTES}")
        is_sealed = frame.startswith(MARK)
        if self._secret is None:
            if is_sealed:
                raise BadFrame(
                    "a worker has a worker secret and this master has none: start both with "
                    "--worker-secret-env, or neither",
                    UNEXPECTED,
                )
            return frame
        if not is_sealed:
            raise BadFrame(
                "a peer has no worker secret: start each worker with --worker-secret-env", MISSING
            )
        tag, counter = frame[len(MARK) : len(MARK) + _TAG], frame[_HEAD - _COUNTER : _HEAD]
        message = frame[_HEAD:]
        expected = _tag(self._secret, self._direction, identity, counter, message)
        if len(counter) < _COUNTER or not hmac.compare_digest(tag, expected):
            raise BadFrame(
                "a peer has another worker secret: --worker-secret-env must name a variable with "
                "the same value on both sides",
                DIFFERENT,
            )
        number = int.from_bytes(counter, "big")
        if number <= self._counters.get(identity, -1):
            raise BadFrame("a frame was repeated")
        self._counters[identity] = number
        return message


def read_notice(frame: bytes) -> str | None:
    """The text of a notice; None for another frame."""
    if not frame.startswith(NOTICE):
        return None
    return NOTICES.get(frame[len(NOTICE) :])


class Complaints:
    """Prints refusals at most once in `every_s` seconds, with the number since the last line, so
    that a flood of frames does not become a flood of lines."""

    def __init__(
        self, log: Callable[[str], None], now_s: Callable[[], float], every_s: float = 10.0
    ) -> None:
        self._log, self._now_s, self._every_s = log, now_s, every_s
        self._next_s = float("-inf")
        self._n_since = 0
        self.n = 0

    def add(self, text: str) -> None:
        self.n += 1
        self._n_since += 1
        if self._now_s() < self._next_s:
            return
        more = f" (and {self._n_since - 1} others since the last line)" if self._n_since > 1 else ""
        self._log(f"a message was refused: {text}{more}")
        self._next_s, self._n_since = self._now_s() + self._every_s, 0


def _tag(secret: bytes, direction: bytes, identity: bytes, counter: bytes, message: bytes) -> bytes:
    # Lengths before the parts of variable length: no two inputs give the same bytes.
    head = direction + len(identity).to_bytes(4, "big") + identity + counter
    mac = hmac.new(secret, b"slobench worker frame 1:" + head, "sha256")
    mac.update(message)
    return mac.digest()
