"""The script of the mock server: when each piece of a reply is written, which failures happen, and
the options that set it (`--ttft 50ms --fail 500:10%` on the command line, `ttft=50ms,fail=cut`
elsewhere).

A pure function of the script, its seed and the number of the request decides everything: the same
requests get the same treatment in every run, in any order of arrival.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from loadgen.errors import UsageError, nearest
from loadgen.units import parse_duration_s, parse_rate_per_s, parse_share
from targets.mock_personas import PERSONAS

Parse = Callable[[str], Any]

FAILURES: Mapping[str, str] = {
    "cut": "half of the tokens, then the connection is closed",
    "hang": "never answers",
    "inband": "half of the tokens, then an error event after the 200",
    "notsse": "a 200 with an HTML page",
    "reset": "the connection is reset (RST) instead of an answer",
    "short": "half of the tokens, then a clean end with the finish reason stop",
    "utf8": "half of the tokens, then an event that is not UTF-8",
}  # and any HTTP status from 400 to 599

REJECTABLE = (
    "continuous_usage_stats",
    "documents",
    "ignore_eos",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "min_tokens",
    "priority",
    "stream_options",
    "temperature",
    "temperature!=1",
)


WRONG_USAGE: Mapping[str, float] = {"zero": 0.0, "half": 0.5, "tenfold": 10.0}
"""Wrong usage → the factor on the number of tokens."""


class Stall(NamedTuple):
    """All replies frozen for `length_s`, `start_s` after the first request was read. With a load
    generator, which sends an `x-seq` header, its first request counts.
    """

    start_s: float
    length_s: float


class Loading(NamedTuple):
    """The first `length_s` of the server's life. Completions answer 503 "Loading model"; the list
    of models does too (`503`), is empty (`empty`), or is complete (`listed`)."""

    length_s: float
    models: str


class Failure(NamedTuple):
    """A kind of FAILURES, or an HTTP status as digits, for a `share` of the requests."""

    kind: str
    share: float


@dataclass(frozen=True)
class Script:
    """The behaviour of the mock server.

    Event j of a reply is due `ttft_s + j · coalesce · itl_s` after the request was read completely,
    independent of earlier events: nothing drifts. A stall is an interval of the server's life in
    which no reply is written. Events that fall due in it are written at its end, in order; later
    events are not shifted.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.01
    coalesce: int = 1  # tokens per event
    tokens: int = 64  # for a request without a limit
    eos_after: int | None = None  # a request without ignore_eos stops after so many
    reasoning: int = 0  # leading tokens that are reasoning (chat only)
    role: str = "first"  # first: with the first token · early: with the headers · off
    usage: str = "on"  # off: not even on request; zero, half, tenfold: a wrong count
    finish: str = ""  # the finish reason; empty: length, or stop at the end of the answer
    done: str = "on"  # off: the stream ends without [DONE]
    chars_per_token: float = 4.0
    overhead_tokens: int = 8  # of the chat template; completions have none
    cached_tokens: int = 0
    stalls: tuple[Stall, ...] = ()
    failures: tuple[Failure, ...] = ()
    rejects: tuple[str, ...] = ()  # body fields answered with 400
    refusal: str = "named"  # silent: the 400 does not name the field
    request_id: str = "any"  # uuid: 400 for an `x-request-id` of another form
    loading: tuple[Loading, ...] = ()
    max_model_len: int | None = None
    api_key: str | None = None
    models: tuple[str, ...] = ("mock-model",)
    mute_models: tuple[str, ...] = ()  # served models that do not chat, such as embedding models
    seed: int = 0
    persona: str = ""

    def __post_init__(self) -> None:
        total = sum(failure.share for failure in self.failures)
        if total > 1 + 1e-9:
            raise UsageError(f"mock option fail: the shares add up to {total:.0%}; at most 100%")

    def due_s(self, event: int) -> float:
        """The deadline of event number `event`, seconds after the request was read."""
        return self.ttft_s + event * self.coalesce * self.itl_s

    def loading_models(self, age_s: float) -> str | None:
        """What the list of models is while the server loads; None once it has loaded."""
        return next((load.models for load in self.loading if age_s < load.length_s), None)

    def after_stalls_s(self, instant_s: float) -> float:
        """The instant itself (seconds after the first request), or the end of the stalls that
        contain it.
        """
        for stall in sorted(self.stalls):
            if stall.start_s <= instant_s < stall.start_s + stall.length_s:
                instant_s = stall.start_s + stall.length_s
        return instant_s

    def failure(self, number: int) -> str | None:
        """The failure of request `number`, independent of other requests; None: no failure."""
        left = _uniform(self.seed, number)
        for failure in self.failures:
            left -= failure.share
            if left < 0:
                return failure.kind
        return None

    def prompt_tokens(self, text: str, is_chat: bool) -> int:
        """The token count of a prompt: linear in its characters, rounded."""
        return round(len(text) / self.chars_per_token) + (self.overhead_tokens if is_chat else 0)

    def output_tokens(self, limit: int | None, ignore_eos: bool) -> tuple[int, str]:
        """(number of tokens, finish reason) of a reply."""
        n_tokens = self.tokens if limit is None else limit
        if self.eos_after is not None and not ignore_eos and self.eos_after < n_tokens:
            return self.eos_after, self.finish or "stop"
        return n_tokens, self.finish or "length"


def _uniform(seed: int, number: int) -> float:
    """A number in [0, 1), a function of its arguments only."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def apply_options(script: Script, options: Iterable[tuple[str, str]]) -> Script:
    """The script with `options` set. Several values of a repeatable option (stall, fail, reject,
    model) are collected; together they replace the script's.

    Raises UsageError with the option, its value and the expected form.
    """
    changes: dict[str, Any] = {}
    for key, value in _with_personas(options):
        name = key.replace("-", "_")
        if name not in OPTIONS:
            raise UsageError(f"unknown mock option '{key}'; {nearest(name, OPTIONS)}")
        field, parse, _ = OPTIONS[name]
        try:
            parsed = parse(value)
        except ValueError as error:
            raise UsageError(f"mock option {key} {value!r}: {error}") from None
        changes[field] = changes.get(field, ()) + parsed if isinstance(parsed, tuple) else parsed
    return replace(script, **changes)


def _with_personas(options: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The options, each persona after its own options."""
    for key, value in options:
        if key == "persona" and value in PERSONAS:
            for name, values in PERSONAS[value].options.items():
                yield from ((name, part) for part in values.split(";"))
        yield key, value


def split_options(text: str) -> list[tuple[str, str]]:
    """The pairs of `key=value,key=value`. Raises UsageError for a part without `=`."""
    pairs = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        key, separator, value = part.partition("=")
        if not separator:
            raise UsageError(f"option {part!r}: expected key=value")
        pairs.append((key.strip(), value.strip()))
    return pairs


def _stall(text: str) -> tuple[Stall, ...]:
    length, separator, start = text.partition("@")
    if not separator:
        raise ValueError("expected LENGTH@START, e.g. 1.4s@5s")
    return (Stall(parse_duration_s(start), parse_duration_s(length)),)


def _loading(text: str) -> tuple[Loading, ...]:
    length, _, models = text.partition("@")
    return (Loading(parse_duration_s(length), _word("503", "empty", "listed")(models or "503")),)


def _failure(text: str) -> tuple[Failure, ...]:
    kind, separator, share = text.partition(":")
    if kind not in FAILURES and not (kind.isascii() and kind.isdigit() and 400 <= int(kind) < 600):
        raise ValueError(f"no such failure; {nearest(kind, [*FAILURES, 'a status 400 to 599'])}")
    return (Failure(kind, parse_share(share) if separator else 1.0),)


def _integer(least: int) -> Parse:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < least:
            raise ValueError(f"expected an integer, {least} or more")
        return int(text)

    return parse


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError("expected a positive number")
    return number


def _word(*words: str) -> Parse:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(nearest(text, words))
        return text

    return parse


def _repeatable(parse: Parse) -> Parse:
    return lambda text: (parse(text),)


OPTIONS: dict[str, tuple[str, Parse, str]] = {
    "ttft": ("ttft_s", parse_duration_s, "time to first token, e.g. 50ms"),
    "itl": ("itl_s", parse_duration_s, "time between tokens, e.g. 10ms"),
    "speed": ("itl_s", lambda text: 1 / parse_rate_per_s(text), "tokens per second, e.g. 100/s"),
    "coalesce": ("coalesce", _integer(1), "tokens per event"),
    "tokens": ("tokens", _integer(1), "output tokens of a request without a limit"),
    "eos_after": ("eos_after", _integer(1), "stop after so many tokens without ignore_eos"),
    "reasoning": ("reasoning", _integer(0), "leading reasoning tokens (chat)"),
    "role": ("role", _word("first", "early", "off"), "the role: with the first token, early, off"),
    "usage": ("usage", _word("on", "off", *WRONG_USAGE), "off: none; zero, half, tenfold: wrong"),
    "finish": ("finish", str, "the finish reason, e.g. abort"),
    "done": ("done", _word("on", "off"), "off: no [DONE] at the end"),
    "chars_per_token": ("chars_per_token", _positive, "characters of a prompt token"),
    "overhead_tokens": ("overhead_tokens", _integer(0), "tokens of the chat template"),
    "cached_tokens": ("cached_tokens", _integer(0), "cached prompt tokens to report"),
    "stall": ("stalls", _stall, "freeze all replies, LENGTH@START, e.g. 1.4s@5s"),
    "fail": ("failures", _failure, f"KIND[:SHARE]; {', '.join(FAILURES)} or an HTTP status"),
    "reject": ("rejects", _repeatable(_word(*REJECTABLE)), "answer 400 to this request field"),
    "refusal": ("refusal", _word("named", "silent"), "silent: a 400 does not name the field"),
    "request_id": ("request_id", _word("any", "uuid"), "uuid: 400 for any other x-request-id"),
    "max_model_len": ("max_model_len", _integer(1), "most tokens of prompt and output"),
    "api_key": ("api_key", str, "the only key accepted"),
    "model": ("models", _repeatable(str), "name of a served model"),
    "mute_model": ("mute_models", _repeatable(str), "a served model that does not chat"),
    "loading": ("loading", _loading, "503 at first, e.g. 2s; 2s@empty, 2s@listed: the models"),
    "persona": ("persona", _word(*PERSONAS), "the form of a named server's stream, e.g. ollama"),
    "seed": ("seed", _integer(0), "which requests fail"),
}
"""Option name → (field of Script, parser, help)."""
