"""Locust's sockets and runners, guarded against peers: a frame that is not a message of this run is
refused and counted.

Locust's own receive loops end, and the run with them, at the first frame that is not MessagePack of
the expected form. `guard` binds the classes of this module in place of Locust's in this process;
Locust's installed files stay as they are. Source: docs/decisions/0058-strangers-at-the-master.md
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import locust.env
import locust.runners
import zmq.green as zmq
from locust.exception import RPCError
from locust.rpc import Message, zmqrpc
from locust.runners import MasterRunner, WorkerRunner
from zmq.error import ZMQError

from loadgen.errors import UsageError
from loadgen.web.frame_seal import (
    DOWN,
    MOST_FRAME_BYTES,
    NOTICE,
    UP,
    BadFrame,
    Complaints,
    Opener,
    Sealer,
    read_notice,
)

_MOST_QUEUED_FRAMES = 64  # per worker; a worker has two unconfirmed pieces and a frame on the way
_REPORTS = frozenset(("heartbeat", "stats", "spawning_complete", "logs", "exception"))
"""Messages with fields, which only a worker sends that has joined."""
_log = logging.getLogger("slobench")


def guard(secret: bytes | None) -> None:
    """Binds the guarded sockets and runners in this process; `secret` is that of `Sealer`."""

    class Server(_GuardedServer):
        def __init__(self, host: str, port: int) -> None:
            super().__init__(host, port, secret)

    class Client(_GuardedClient):
        def __init__(self, host: str, port: int, identity: str) -> None:
            super().__init__(host, port, identity, secret)

    locust.runners.rpc = SimpleNamespace(Server=Server, Client=Client)
    locust.env.MasterRunner = GuardedMasterRunner
    locust.env.WorkerRunner = GuardedWorkerRunner


def read_message(data: bytes, identity: str | None) -> Message:
    """Locust's message in an opened frame. `identity` is the sender's, which the message must name;
    None for messages of the master. Raises BadFrame."""
    try:
        message = Message.unserialize(data)
    except Exception as error:  # a peer's boundary: any bytes, through two libraries
        raise BadFrame(f"{len(data)} bytes are no message: {type(error).__name__}") from None
    if not isinstance(message.type, str) or not isinstance(message.node_id, str):
        raise BadFrame("the type or the sender of a message is not text")
    if identity is not None and message.node_id != identity:
        raise BadFrame("a message names another worker as its sender")
    return message


class _Sealed:
    """A message with the `serialize` that Locust's sockets call, which seals."""

    def __init__(self, message: Message, seal: Callable[[bytes, bytes], bytes], identity: str):
        self._message, self._seal, self.node_id = message, seal, identity

    def serialize(self) -> bytes:
        return self._seal(self.node_id.encode(), self._message.serialize())


class _GuardedServer(zmqrpc.Server):
    def __init__(self, host: str, port: int, secret: bytes | None) -> None:
        zmqrpc.BaseSocket.__init__(self, zmq.ROUTER, self.ipv4_only(host, port))
        self._sealer = Sealer(secret, DOWN, time.time_ns())
        self._opener = Opener(secret, UP)
        self._complaints = Complaints(_log.warning, time.monotonic)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        self.socket.setsockopt(zmq.RCVHWM, _MOST_QUEUED_FRAMES)
        try:
            if port == 0:
                self.port = self.socket.bind_to_random_port(f"tcp://{host}")
            else:
                self.socket.bind(f"tcp://{host}:{port}")
                self.port = port
        except ZMQError as error:
            raise RPCError(f"Socket bind failure: {error}") from error

    def send_to_client(self, message: Message) -> None:
        super().send_to_client(_Sealed(message, self._sealer.seal, message.node_id))

    def recv_from_client(self) -> tuple[str, Message]:
        """The next message of a worker; all other frames are refused."""
        while True:
            identity, frames = self._received()
            try:
                return self._read(identity, frames)
            except BadFrame as problem:
                self._complaints.add(str(problem))
                if problem.notice:
                    self._notify(identity, problem.notice)

    def _received(self) -> tuple[bytes, list[bytes]]:
        """A peer's identity and its first two frames; later frames are dropped as they come."""
        try:
            identity: bytes = self.socket.recv()
            frames: list[bytes] = []
            while self.socket.getsockopt(zmq.RCVMORE):
                frame = self.socket.recv()
                if len(frames) < 2:
                    frames.append(frame)
        except ZMQError as error:
            raise RPCError("ZMQ network broken") from error
        return identity, frames

    def _read(self, identity: bytes, frames: list[bytes]) -> tuple[str, Message]:
        if len(frames) != 1:
            raise BadFrame(f"expected a message of one frame, found {len(frames)} or more")
        try:
            name = identity.decode()
        except UnicodeDecodeError:
            raise BadFrame("the identity of a peer is not text") from None
        return name, read_message(self._opener.open(identity, frames[0]), name)

    def _notify(self, identity: bytes, reason: bytes) -> None:
        try:
            self.socket.send_multipart([identity, NOTICE + reason], zmq.NOBLOCK)
        except ZMQError as error:
            self._complaints.add(f"its sender could not be notified: {error}")


class _GuardedClient(zmqrpc.Client):
    def __init__(self, host: str, port: int, identity: str, secret: bytes | None) -> None:
        zmqrpc.BaseSocket.__init__(self, zmq.DEALER, self.ipv4_only(host, port))
        self._identity = identity
        self._sealer = Sealer(secret, UP, time.time_ns())
        self._opener = Opener(secret, DOWN)
        self._complaints = Complaints(_log.warning, time.monotonic)
        self._has_master = False
        self.socket.setsockopt(zmq.IDENTITY, identity.encode())
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
        self.socket.connect(f"tcp://{host}:{port}")

    def send(self, message: Message) -> None:
        super().send(_Sealed(message, self._sealer.seal, self._identity))

    def recv(self) -> Message:
        """The next message of the master. A notice before the first message ends the process: this
        worker cannot join."""
        while True:
            try:
                frames = self.socket.recv_multipart()
            except ZMQError as error:
                raise RPCError("ZMQ network broken") from error
            reason = None if self._has_master else read_notice(frames[0])
            if reason is not None:
                _log.error(reason)
                raise SystemExit(UsageError.exit_code)
            try:
                if len(frames) != 1:
                    raise BadFrame(f"expected a message of one frame, found {len(frames)}")
                data = self._opener.open(self._identity.encode(), frames[0])
                message = read_message(data, None)
            except BadFrame as problem:
                self._complaints.add(str(problem))
            else:
                self._has_master = True
                return message


def _handled(handle: Callable[..., Any], *words: Any) -> None:
    """Handles a message whose content a peer chose: an error in it is logged, and the loop goes
    on."""
    try:
        handle(*words)
    except Exception as error:  # a peer's boundary: Locust reads the content without checks
        kind = getattr(words[-1], "type", "")
        _log.warning(f"a message {kind[:40]!r} was refused: {type(error).__name__}")


class GuardedMasterRunner(MasterRunner):
    """Locust's master, whose loop outlives a malformed message."""

    def handle_message(self, client_id: str, msg: Message) -> None:
        if msg.type in _REPORTS and not (isinstance(msg.data, dict) and client_id in self.clients):
            _log.debug(f"a message {msg.type!r} was refused: of no worker, or without its fields")
            return
        _handled(super().handle_message, client_id, msg)


class GuardedWorkerRunner(WorkerRunner):
    """Locust's worker, whose loop outlives a malformed message."""

    def handle_message(self, msg: Message) -> None:
        _handled(super().handle_message, msg)
