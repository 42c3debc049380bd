"""What the mock server does to a request, as data: when each piece is written, and what goes wrong
on purpose.

Everything here is a pure function of the script, its seed and the request's number: the same
requests get the same treatment in every run, in whatever order they arrive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from loadgen.errors import UsageError

FAILURES: Mapping[str, str] = {
    "cut": "half of the tokens, then the connection is closed",
    "hang": "never answers",
    "inband": "half of the tokens, then an error event after the 200",
    "notsse": "a 200 with an HTML page",
    "reset": "the connection is reset (RST) instead of an answer",
    "utf8": "half of the tokens, then an event that is not UTF-8",
}  # and any HTTP status from 400 to 599


class Stall(NamedTuple):
    """Replies frozen for `length_s`, from `start_s` after the first request (of a load generator,
    told by its `x-seq` header, if one comes) was read.
    """

    start_s: float
    length_s: float


class Failure(NamedTuple):
    """A kind of FAILURES, or an HTTP status as digits, for a `share` of the requests."""

    kind: str
    share: float


@dataclass(frozen=True)
class Script:
    """How the mock behaves.

    Event j of a reply is due `ttft_s + j · coalesce · itl_s` after the request was read completely,
    whatever happened before: nothing drifts. A stall is one interval of the server's life in which
    no reply is written to; what falls due in it is written at its end, in order, and what is due
    later is not shifted.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    coalesce: int = 1  # tokens per event
    tokens: int = 64  # where the request does not say
    eos_after: int | None = None  # a request without ignore_eos stops after so many
    reasoning: int = 0  # leading tokens that are reasoning (chat only)
    role: str = "first"  # first: with the first token · early: with the headers · off
    usage: str = "on"  # off: not even when asked for
    done: str = "on"  # off: the stream ends without [DONE]
    chars_per_token: float = 4.0
    overhead_tokens: int = 8  # of the chat template; completions have none
    cached_tokens: int = 0
    stalls: tuple[Stall, ...] = ()
    failures: tuple[Failure, ...] = ()
    rejects: tuple[str, ...] = ()  # body fields answered with 400
    max_model_len: int | None = None
    api_key: str | None = None
    models: tuple[str, ...] = ("mock-model",)
    seed: int = 0

    def __post_init__(self) -> None:
        total = sum(failure.share for failure in self.failures)
        if total > 1 + 1e-9:
            raise UsageError(f"mock option fail: the shares add up to {total:.0%}; at most 100%")

    def due_s(self, event: int) -> float:
        """When event number `event` is due, seconds after the request was read."""
        return self.ttft_s + event * self.coalesce * self.itl_s

    def after_stalls_s(self, instant_s: float) -> float:
        """The instant itself (seconds after the first request), or the end of the stalls it falls
        into.
        """
        for stall in sorted(self.stalls):
            if stall.start_s <= instant_s < stall.start_s + stall.length_s:
                instant_s = stall.start_s + stall.length_s
        return instant_s

    def failure(self, number: int) -> str | None:
        """What goes wrong with request `number`, if anything; whatever the others do."""
        left = _uniform(self.seed, number)
        for failure in self.failures:
            left -= failure.share
            if left < 0:
                return failure.kind
        return None

    def prompt_tokens(self, text: str, is_chat: bool) -> int:
        """How many tokens a prompt is taken to have: linear in its characters, rounded."""
        return round(len(text) / self.chars_per_token) + (self.overhead_tokens if is_chat else 0)

    def output_tokens(self, asked: int | None, ignore_eos: bool) -> tuple[int, str]:
        """How many tokens a reply has, and its finish reason."""
        wanted = self.tokens if asked is None else asked
        if self.eos_after is not None and not ignore_eos and self.eos_after < wanted:
            return self.eos_after, "stop"
        return wanted, "length"


def _uniform(seed: int, number: int) -> float:
    """A number in [0, 1) that depends on nothing but its arguments."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
