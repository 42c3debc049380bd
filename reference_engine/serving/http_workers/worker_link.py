"""The engine's end of the channel to an HTTP worker: passes the worker's requests to the service,
and sends the answers back, a message per step."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from reference_engine.serving.http_workers import channel
from reference_engine.serving.service import Service
from reference_engine.serving.streams import Sink, StreamDelta, StreamProgress
from reference_engine.serving.wire.wire_errors import WireError
from reference_engine.state.sequence import Request

log = logging.getLogger(__name__)

_MOST_UNSENT_BYTES = 1 << 26  # some million tokens: a worker so far behind does not respond


class WorkerLink:
    """The link to an HTTP worker. The engine never waits for a worker: if it leaves more than
    `most_unsent` bytes unread, its answers are cut off like those of slow readers. `on_lost` is
    called if the worker ends before `close`."""

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
        self._step = channel.StepOutput([], [])
        self._channel: channel.Channel[channel.FromWorker] = channel.Channel(
            channel.FromWorker, self._on_message, self._on_end
        )

    async def open(self, end: socket.socket, message: channel.Open) -> None:
        """Send `message`, and return when the worker accepts connections or is lost."""
        await self._channel.open(end)
        self.send(message)
        await self._is_settled.wait()

    def close(self) -> None:
        self._is_closing = True
        self.send(channel.Bye())
        self._channel.close()

    def send(self, message: channel.Message) -> None:
        self._channel.send(message)

    def put(self, number: int, delta: StreamDelta, request: Request | None) -> None:
        """Send a delta with the message of this step, with the progress of `request` if given."""
        step = self._step
        if request is not None:
            step.progress.append((number, StreamProgress.of(request)))
        if (
            not step.deltas
        ):  # the service delivers all deltas of a step in the same turn of the loop
            asyncio.get_running_loop().call_soon(self._send_step)
        step.deltas.append((number, delta))

    def _send_step(self) -> None:
        step, self._step = self._step, channel.StepOutput([], [])
        if self._channel.n_unsent <= self._most_unsent:
            self.send(step)
            return
        for number, relay in self._relays.items():
            self._service.cut_off(relay)
            self.send(
                channel.Failed.of(number, WireError("the HTTP worker is too slow", status=500))
            )
        self._relays.clear()

    def _on_message(self, message: channel.FromWorker) -> None:
        match message:
            case channel.Submit():
                self._submit(message)
            case channel.Closed(number):
                if (relay := self._relays.pop(number, None)) is not None:
                    relay.close()
            case channel.CutOff(number):
                if (relay := self._relays.pop(number, None)) is not None:
                    self._service.cut_off(relay)
            case channel.Listening():
                self._is_settled.set()

    def _submit(self, message: channel.Submit) -> None:
        number = message.number
        make_relay = partial(Relay, number, self)
        try:
            self._relays[number] = self._service.submit_to(
                make_relay, message.call, message.request_id, message.arrived_s
            )
        except WireError as error:
            self.send(channel.Failed.of(number, error))
        except Exception:  # the request's boundary: a bug of the server, logged
            log.exception("request %s failed", message.request_id)
            self.send(channel.Failed.of(number, WireError("internal error", status=500)))

    def _on_end(self) -> None:
        for relay in self._relays.values():
            relay.close()
        self._relays.clear()
        self._is_settled.set()
        if not self._is_closing:
            self.is_lost = True
            self._on_lost()


class Relay:
    """Sends the answer to a request to an HTTP worker; a `Sink`."""

    def __init__(
        self, number: int, link: WorkerLink, request: Request, close: Callable[[Sink], None]
    ) -> None:
        self.request: Request | StreamProgress = request
        self.is_over = self.is_closed = self.is_broken = False
        self.is_blocked = False  # the worker detects slow readers itself
        self._number, self._link, self._request, self._close = number, link, request, close
        self._is_begun = False

    def admit(self) -> None:
        self._link.send(channel.Admitted(self._number, StreamProgress.of(self._request)))

    def put(self, delta: StreamDelta) -> int:
        """Send a delta. Returns 1 for the last delta, which counts as unread until the worker
        closes the request, else 0."""
        self.is_over = delta.finish_reason is not None
        has_progress = self.is_over or not self._is_begun
        self._is_begun = True
        self._link.put(self._number, delta, self._request if has_progress else None)
        return int(self.is_over)

    def fail(self, error: WireError) -> None:
        if not self.is_over:
            self.is_broken = True
            self._link.send(channel.Failed.of(self._number, error))

    def cut_off(self) -> None:
        self.is_over, self.is_broken = False, True

    def close(self) -> None:
        self._close(self)
