"""A server that answers well until the first request of a run, and then as one of many patients:
quickly, under a status 200 where that is possible, and wrongly.

Its good answers are words that depend on the prompt alone, with exact counts. The preflight's
requests carry no number; canaries carry none either and are treated like the run's as soon as it
has begun.
"""

import json
from hashlib import sha256
from typing import Any

from tests.e2e.threaded import ThreadedServer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORDS = ("red", "blue", "oak", "sea", "sun", "ice", "fox", "elm", "tin", "sky", "owl", "bay")
DONE = b"data: [DONE]\n\n"
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'


def words(prompt: str, n: int, salt: str = "") -> list[str]:
    """n words that depend on the prompt and the salt."""
    digest = sha256(f"{salt}{prompt}".encode()).digest()
    return [f"{WORDS[(digest[k % 32] + k // 32) % len(WORDS)]} " for k in range(n)]


def event(*choices, model="m", **fields) -> bytes:
    body = {"id": "1", "object": "chat.completion.chunk", "model": model, "choices": list(choices)}
    return b"data: " + json.dumps({**body, **fields}).encode() + b"\n\n"


def delta(finish=None, **content) -> dict[str, Any]:
    return {"index": 0, "delta": content, "finish_reason": finish}


def stream(texts, finish="length", n_counted=None, model="m", has_end=True) -> list[bytes]:
    """The events of an answer of these tokens."""
    n = len(texts) if n_counted is None else n_counted
    tokens = [event(delta(content=text), model=model) for text in texts]
    usage = {"prompt_tokens": 9, "completion_tokens": n, "total_tokens": 9 + n}
    end = [event(delta(finish), model=model), event(usage=usage, model=model), DONE]
    return [event(delta(role="assistant", content=""), model=model), *tokens, *end * has_end]


def framed(events) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return HEAD + chunks + b"0\r\n\r\n"


def plain(body: bytes, status: str = "200 OK", kind: str = "text/html") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


CUT = b""  # ends the connection

PATIENTS = {
    # dead behind a 200
    "only_done": lambda prompt, n, k: framed([DONE]),
    "empty_stream": lambda prompt, n, k: framed([]),
    "empty_body": lambda prompt, n, k: plain(b"", kind="text/event-stream"),
    "no_content": lambda prompt, n, k: b"HTTP/1.1 204 No Content\r\n\r\n",
    "html": lambda prompt, n, k: plain(b"<html><body>Please log in</body></html>"),
    "text": lambda prompt, n, k: plain(b"upstream connect error", kind="text/plain"),
    "json_null": lambda prompt, n, k: plain(b"null", kind="application/json"),
    "heartbeats": lambda prompt, n, k: framed([b": ping\n\n"] * 4 + [DONE]),
    "cut_at_once": lambda prompt, n, k: CUT,
    # zero tokens
    "zero_tokens": lambda prompt, n, k: framed(stream([])),
    "zero_tokens_counted": lambda prompt, n, k: framed(stream([], n_counted=n)),
    "role_only": lambda prompt, n, k: framed([event(delta(role="assistant")), DONE]),
    "empty_texts": lambda prompt, n, k: framed(stream([""] * n)),
    "null_texts": lambda prompt, n, k: framed(stream([None] * n)),
    "empty_choices": lambda prompt, n, k: framed([event()] * n + [DONE]),
    "no_choices": lambda prompt, n, k: framed(
        [b'data: {"object":"chat.completion.chunk"}\n\n'] * n
    ),
    "usage_alone": lambda prompt, n, k: framed([event(usage={"completion_tokens": n}), DONE]),
    "stop_at_once": lambda prompt, n, k: framed(stream([], finish="stop")),
    # errors inside a 200
    "error_event": lambda prompt, n, k: framed([b'data: {"error":{"message":"CUDA"}}\n\n', DONE]),
    "error_midway": lambda prompt, n, k: framed(
        [*stream(words(prompt, 3), has_end=False), b'data: {"error":{"message":"CUDA"}}\n\n']
    ),
    "aborted": lambda prompt, n, k: framed(stream(words(prompt, n), finish="abort")),
    "error_finish": lambda prompt, n, k: framed(stream(words(prompt, n), finish="error")),
    "bare_error": lambda prompt, n, k: framed([b"data: Service Unavailable\n\n", DONE]),
    # one text for every prompt
    "same_token": lambda prompt, n, k: framed(stream(["the "] * n)),
    "exclamations": lambda prompt, n, k: framed(stream(["!"] * n)),
    "newlines": lambda prompt, n, k: framed(stream(["\n"] * n)),
    "canned": lambda prompt, n, k: framed(stream(words("", n))),
    "canned_apology": lambda prompt, n, k: framed(stream(["I am ", "sorry. "] * (n // 2))),
    # truncated
    "half": lambda prompt, n, k: framed(stream(words(prompt, n // 2), finish="stop")),
    "one_token": lambda prompt, n, k: framed(stream(words(prompt, 1), finish="stop")),
    "without_end": lambda prompt, n, k: framed(stream(words(prompt, n // 2), has_end=False)),
    "cut_midway": lambda prompt, n, k: framed(stream(words(prompt, n), has_end=False))[:-200],
    "counted_as_whole": lambda prompt, n, k: framed(stream(words(prompt, 2), n_counted=n)),
    # one backend of four
    "a_quarter_empty": lambda prompt, n, k: framed(stream(words(prompt, n if k % 4 else 0))),
    "a_quarter_errors": lambda prompt, n, k: (
        plain(b"{}", *[] if k % 4 else ["503 Down"])
        if not k % 4
        else framed(stream(words(prompt, n)))
    ),
    "a_quarter_cut": lambda prompt, n, k: framed(stream(words(prompt, n))) if k % 4 else CUT,
    "a_quarter_html": lambda prompt, n, k: (
        framed(stream(words(prompt, n))) if k % 4 else plain(b"<html>")
    ),
    # wrong answers, which only canaries find
    "swapped_model": lambda prompt, n, k: framed(stream(words(prompt, n, "other"))),
    "garbage": lambda prompt, n, k: framed(stream([f"#{k * n + i} " for i in range(n)])),
    "loops": lambda prompt, n, k: framed(stream([*words(prompt, 3), *["so "] * (n - 3)])),
    "other_prompt": lambda prompt, n, k: framed(stream(words(prompt[::-1], n))),
    "shuffled": lambda prompt, n, k: framed(stream(words(prompt, n)[::-1])),
    "a_quarter_swapped": lambda prompt, n, k: framed(
        stream(words(prompt, n, "" if k % 4 else "other"))
    ),
}
"""Name → (prompt, requested tokens, number of the request under load) → bytes of the answer."""


class Sick(ThreadedServer):
    """The server in a thread; `url` is its address, and `patient` who answers the next run ("": it
    stays well)."""

    def __init__(self) -> None:
        super().__init__()
        self.becomes("")

    def becomes(self, patient: str) -> None:
        """Answers well until the next request of a run, and then as this patient."""
        self._patient, self._has_begun = patient, False
        self._n_loaded = {True: 0, False: 0}  # requests of the run, and canaries

    async def _answer(self, reader, writer) -> bool:
        answer = await self._answered(reader)
        writer.write(answer)
        await writer.drain()
        return bool(answer)

    async def _answered(self, reader) -> bytes:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if head.startswith("GET"):
            return plain(MODELS, kind="application/json")
        request = json.loads(body)
        prompt, n = str(request["messages"]), request["max_tokens"]
        is_of_run = "x-seq" in fields
        self._has_begun = self._has_begun or is_of_run
        if not (self._has_begun and self._patient):
            return framed(stream(words(prompt, n)))
        self._n_loaded[is_of_run] += 1
        return PATIENTS[self._patient](prompt, n, self._n_loaded[is_of_run])
