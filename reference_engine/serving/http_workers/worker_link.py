"""The engine's end of the channel to an HTTP worker: its requests go to the service, and what their
answers get goes out as one message a step."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from reference_engine.serving.http_workers.channel import (
    Admitted,
    Broken,
    Bye,
    Channel,
    Closed,
    CutOff,
    FromWorker,
    Listening,
    Message,
    Open,
    RequestRefused,
    StepOutput,
    Submit,
)
from reference_engine.serving.service import Service
from reference_engine.serving.streams import Sink, StreamBroken, StreamDelta, StreamProgress
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Request

log = logging.getLogger(__name__)

# Some million tokens: an HTTP worker that is so far behind hangs.
_MOST_UNSENT_BYTES = 1 << 26


class WorkerLink:
    """The engine never waits for a worker: one that leaves more than `most_unsent` bytes lying has
    its answers cut off, as a reader who is too slow has. `on_lost` is called when it is gone
    without having been asked."""

    def __init__(
        self,
        service: Service,
        on_lost: Callable[[], None],
        most_unsent: int = _MOST_UNSENT_BYTES,
    ) -> None:
        self.is_lost = False
        self._is_closing = False
        self._is_settled = asyncio.Event()
        self._service, self._on_lost, self._most_unsent = service, on_lost, most_unsent
        self._relays: dict[int, Relay] = {}
        self._step = StepOutput([], [])
        self._channel: Channel[FromWorker] = Channel(FromWorker, self._on_message, self._on_end)

    async def open(self, end: socket.socket, what: Open) -> None:
        """Returns when the HTTP worker accepts connections or is lost."""
        await self._channel.open(end)
        self.send(what)
        await self._is_settled.wait()

    def close(self) -> None:
        self._is_closing = True
        self.send(Bye())
        self._channel.close()

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def tell(self, number: int, request: Request) -> None:
        """How far a request is, with the deltas of this step."""
        self._step.told.append((number, StreamProgress.of(request)))

    def put(self, number: int, delta: StreamDelta) -> None:
        deltas = self._step.deltas
        if not deltas:  # the service hands all of a step over before the loop goes on
            asyncio.get_running_loop().call_soon(self._send_step)
        deltas.append((number, delta))

    def _send_step(self) -> None:
        step, self._step = self._step, StepOutput([], [])
        if self._channel.n_unsent <= self._most_unsent:
            self.send(step)
            return
        for number, relay in self._relays.items():
            self._service.cut_off(relay)
            self.send(Broken(number, "the process that answers is too slow", 500))
        self._relays.clear()

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Closed(number):
                relay = self._relays.pop(number, None)
                if relay is not None:
                    relay.close()
            case CutOff(number):
                relay = self._relays.pop(number, None)
                if relay is not None:
                    self._service.cut_off(relay)
            case Listening():
                self._is_settled.set()

    def _submit(self, message: Submit) -> None:
        number = message.number
        sink = partial(Relay, number, self)
        try:
            self._relays[number] = self._service.submit_to(
                sink, message.call, message.request_id, message.arrived_s
            )
        except WireError as error:
            self.send(RequestRefused.of(number, error))
        except Exception:  # the request's boundary: a bug of ours, told and kept
            log.exception("request %s failed", message.request_id)
            bug = WireError("internal error", status=500, type_="server_error")
            self.send(RequestRefused.of(number, bug))

    def _on_end(self) -> None:
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
        self._is_settled.set()
        if not self._is_closing:
            self.is_lost = True
            self._on_lost()


class Relay:
    """The answer to one request on its way to an HTTP worker."""

    def __init__(
        self, number: int, link: WorkerLink, request: Request, close: Callable[[Sink], None]
    ) -> None:
        self.request: Request | StreamProgress = request
        self.is_over = self.is_closed = False
        self.is_blocked = False  # the HTTP worker sees to that
        self._number, self._link, self._request, self._close = number, link, request, close
        self._is_begun = self._is_broken = False

    @property
    def outcome(self) -> str:
        if self._is_broken:
            return "failed"
        return "ok" if self.is_over else "disconnected"

    def admit(self) -> None:
        self._link.send(Admitted(self._number, StreamProgress.of(self._request)))

    def put(self, delta: StreamDelta) -> int:
        """1 for the end, which the HTTP worker has to tell its reader, else 0: it is on its way."""
        self.is_over = delta.finish_reason is not None
        if self.is_over or not self._is_begun:
            self._is_begun = True
            self._link.tell(self._number, self._request)
        self._link.put(self._number, delta)
        return int(self.is_over)

    def fail(self, why: Exception) -> None:
        if self.is_over:
            return
        self._is_broken = True
        if isinstance(why, WireError):
            self._link.send(RequestRefused.of(self._number, why))
        else:
            status = why.status if isinstance(why, StreamBroken) else 500
            self._link.send(Broken(self._number, str(why), status))

    def cut_off(self) -> None:
        self.is_over, self._is_broken = False, True

    def close(self) -> None:
        self._close(self)
