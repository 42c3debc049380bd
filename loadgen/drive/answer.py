"""What the server said, as text: for the turn that comes after it."""

from __future__ import annotations

from loadgen.drive.body import Body
from loadgen.drive.exchange import Exchange
from loadgen.drive.sse import SseDecoder
from targets.base import Adapter


def answer_text(exchange: Exchange, adapter: Adapter) -> str:
    """The answer of an exchange that ended well, reasoning left out (chat templates drop it from
    earlier turns); events that cannot be read add nothing, they were judged by `decode`."""
    sse, said = SseDecoder(), []
    events = [event for part in Body(exchange).parts for event in sse.feed(part)]
    last = sse.flush()
    for event in [*events, last] if last is not None else events:
        try:
            delta = adapter.decode(event.data)
        except ValueError:
            continue
        if delta.is_answer:
            said.append(delta.text)
    return "".join(said)
