"""A bounded mutation fuzzer for every parser that reads from outside.

    python -m tests.fuzz [PARSER …] [--seconds 10] [--seed 1] [--runs N]

A parser may return, or raise the project's errors for bad input; any other exception is a failure.
The failing input is written to tests/golden/fuzz/PARSER/ and replayed by tests/test_fuzz.py from
then on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import os
import random
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.archive.decode import answer_texts, decode
from loadgen.archive.exchange import Exchange
from loadgen.archive.store import read_run, write_run, write_schedule
from loadgen.drive.client import Connection
from loadgen.errors import SlobenchError
from loadgen.records import CHUNKS, REQUESTS, Status
from loadgen.system.timer import NoAlarm
from loadgen.web import control_messages as messages
from loadgen.web.frame_seal import BadFrame, Opener, Sealer
from loadgen.web.validate import check_frame, check_part, read_self_report
from loadgen.workload.scenario import load_scenario, shipped_scenarios
from loadgen.workload.traces.trace import TRACES
from reference_engine.serving.wire.call import parse_chat, parse_completion
from reference_engine.serving.wire.named_calls import parse_message, parse_response
from reference_engine.serving.wire.wire_errors import WireError
from targets.anthropic_messages import AnthropicMessages
from targets.endpoint import read_target
from targets.http_session import ProbeConnection
from targets.mock_named_events import FORMS
from targets.mock_script import Script
from targets.openai_chat import OpenAIChat
from targets.openai_completions import OpenAICompletions
from targets.openai_responses import OpenAIResponses
from targets.safe_text import error_message
from targets.server_metrics import read_metrics
from tests.runs import measured_run

GOLDEN = Path(__file__).parent / "golden"
KEPT = GOLDEN / "fuzz"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
_INTERESTING = (
    b"", b"\0", b"\xff", b"\xc1", b"\n", b"\r\n", b"\r\n\r\n", b": ", b"-1", b"1e999", b"NaN",
    b"9" * 40, b"null", b"{}", b"[]", b"[" * 300, b'{"a":' * 300, b"\xed\xa0\x80", b"\\ud800",
    b"data: ", b"data: [DONE]\n\n", b"0\r\n\r\n", b"ffffffffffffffff\r\n", b"Infinity", b"0x1",
    b"!!python/object:os.system", b"&a [*a]", b"1_000", b"\x1f\x8b", b"PK\x03\x04", b"true",
)  # fmt: skip
_LONGEST = 200_000


@dataclass(frozen=True)
class Parser:
    """A parser of bytes, the errors that it may raise, and inputs to start from."""

    parse: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    seeds: Callable[[], Sequence[bytes]]


def failure(parser: Parser, data: bytes) -> str | None:
    """The traceback of an exception that the parser may not raise; None without one."""
    try:
        parser.parse(data)
    except parser.errors:
        return None
    except Exception:
        return traceback.format_exc()
    return None


def mutations(seeds: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """Endless variations of the seeds: changed bytes, cuts, repeats, splices, odd values."""
    while True:
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 4, 8))):
            at = rng.randrange(len(data) + 1)
            end = min(len(data), at + rng.choice((0, 1, 2, 8, 64)))
            kind = rng.randrange(6)
            if kind == 0 and data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at:end] = rng.choice(_INTERESTING)
            elif kind == 2:
                del data[at:end]
            elif kind == 3:
                data[at:at] = data[at:end] * rng.choice((1, 2, 50))
            elif kind == 4:
                other = rng.choice(seeds)
                data[at:end] = other[rng.randrange(len(other) + 1) :][:200]
            else:
                data[at:] = b"" if rng.random() < 0.3 else data[at:]
        yield bytes(data[:_LONGEST])


def fuzz(name: str, seconds: float, seed: int, runs: int | None) -> tuple[int, str | None]:
    """(inputs tried, the traceback of the first failure). A failing input is kept."""
    parser, rng = PARSERS[name], random.Random(seed)
    seeds = [*parser.seeds(), *(path.read_bytes() for path in kept(name))]
    failure(parser, seeds[0])  # imports what it needs before the time counts
    end_s = time.monotonic() + seconds
    for n, data in enumerate(mutations(seeds, rng), start=1):
        if (runs is not None and n > runs) or (runs is None and time.monotonic() > end_s):
            return n - 1, None
        problem = failure(parser, data)
        if problem is not None:
            folder = KEPT / name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / hashlib.sha256(data).hexdigest()[:16]
            path.write_bytes(data)
            return n, f"{problem}input: {path}"
    raise AssertionError("mutations are endless")


def kept(name: str) -> list[Path]:
    """The inputs that failed once."""
    return sorted((KEPT / name).glob("*"))


class _Wire(asyncio.Transport):
    """A transport and the pool of its connection; sends nothing."""

    alarm = NoAlarm()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def write(self, data: Any) -> None: ...
    def abort(self) -> None: ...
    def ring(self) -> None: ...
    def forget(self, connection: object) -> None: ...
    def call_later(self, delay_s: float, call: object, *arguments: object) -> None: ...
    def is_closing(self) -> bool:
        return False

    def looks_like_token(self, data: bytes) -> bool:
        return b"content" in data

    def ended(self, connection: object, exchange: Exchange, *, reusable: bool) -> None: ...


def _read_response(data: bytes) -> None:
    """The measured path: both cuts of a response, then its decoding by both codecs."""
    for n_pieces in (1, 3):
        wire: Any = _Wire({"peername": ("127.0.0.1", 1)})
        connection, exchange = Connection(wire), Exchange(0)
        connection.connection_made(wire)
        connection.start(exchange, b"")
        size = max(1, -(-len(data) // n_pieces))
        for begin in range(0, len(data), size):
            connection.data_received(data[begin : begin + size])
        connection.connection_lost(None)
        _decode(exchange)


def _read_stream(data: bytes) -> None:
    """A recorded body, as the second transport hands it over: without HTTP's framing."""
    for n_pieces in (1, 5):
        size = max(1, -(-len(data) // n_pieces))
        parts = [data[begin : begin + size] for begin in range(0, len(data), size)]
        exchange = Exchange(0, sent_ns=1, headers_ns=2, http_status=200, done_ns=1_000_000)
        exchange.content_type, exchange.parts = "text/event-stream", parts
        exchange.times = list(range(10, 10 + len(parts)))
        _decode(exchange)


def _decode(exchange: Exchange) -> None:
    for codec in (OpenAIChat, OpenAICompletions, OpenAIResponses, AnthropicMessages):
        adapter = codec(model="m")
        found = decode(exchange, adapter)
        assert isinstance(found.status, Status)
        answer_texts(exchange, adapter)[0]


def _read_probe(data: bytes) -> None:
    connection = ProbeConnection()
    connection.data_received(data)
    connection.connection_lost(None)
    assert isinstance(connection.content_type + connection.version, str)
    error_message(data)


def _read_messages(data: bytes) -> None:
    for read in (messages.read_up, messages.read_down):
        try:
            message = read(data)
        except messages.Bad:
            continue
        if isinstance(message, messages.Frame):
            check_frame(message, 10)
        elif isinstance(message, messages.LoadPiece):
            messages.PieceAssembler(message.n).add(message)
        elif isinstance(message, messages.Done):
            read_self_report(message.instrument, 0)


def _read_trace(data: bytes) -> None:
    columns = {"time": "timestamp", "input_tokens": "input_length", "output_tokens": "out"}
    for name in TRACES.names():
        try:
            TRACES.get(name)(**columns if name == "columns" else {}).parse(data, "fuzz")
        except SlobenchError:
            continue


def _read_scenario(data: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(data)
        file.flush()
        load_scenario(file.name)


def _read_body(data: bytes) -> None:
    for parse in (parse_chat, parse_completion, parse_response, parse_message):
        try:
            parse(data)
        except WireError:
            continue


def _read_frame(data: bytes) -> None:
    from loadgen.web.guarded_rpc import read_message  # imports locust, which patches the process

    for secret in (None, b"s" * 32):
        try:
            read_message(Opener(secret, b"up").open(b"w", data), "w")
        except BadFrame:
            continue


def _read_run(data: bytes) -> None:
    """A run directory in a zip archive, so that a mutation may hit any of its files."""
    with tempfile.TemporaryDirectory() as folder:
        size = int.from_bytes(data[:1], "big") % len(_run_files())
        name, original = sorted(_run_files().items())[size]
        for other, content in _run_files().items():
            (Path(folder) / other).write_bytes(content)
        (Path(folder) / name).write_bytes(data[1:] or original)
        read_run(folder)


_FILES: dict[str, bytes] = {}


def _run_files() -> Mapping[str, bytes]:
    if not _FILES:
        with tempfile.TemporaryDirectory() as folder:
            run = measured_run(n_failed=2)
            write_schedule(Path(folder), run)
            write_run(Path(folder), run, {})
            for path in Path(folder).iterdir():
                if path.is_file():
                    _FILES[path.name] = path.read_bytes()
    return _FILES


def _run_seeds() -> list[bytes]:
    return [bytes([n]) + content for n, (_, content) in enumerate(sorted(_run_files().items()))]


def _wire_seeds() -> list[bytes]:
    captured = [path.read_bytes() for path in sorted((GOLDEN / "wire").glob("*.sse"))]
    replies = [
        form(
            script=Script(reasoning=2), number=1, is_chat=True, model="m", prompt_tokens=9,
            tokens=5, finish="length", has_usage=True, continuous=False,
        )
        for form in FORMS.values()
    ]  # fmt: skip
    return captured + [
        b"".join((reply.role(), *map(reply.event, range(5)), reply.tail())) for reply in replies
    ]


def _response_seeds() -> list[bytes]:
    seeds = []
    for body in _wire_seeds():
        seeds.append(_HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        chunk = b"%x\r\n%s\r\n" % (len(body), body)
        seeds.append(_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n")
    seeds.append(b'HTTP/1.1 429 Slow\r\ncontent-length: 28\r\n\r\n{"error": {"message": "no"}}')
    seeds.append(b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n")
    return seeds


def _message_seeds() -> list[bytes]:
    sha256 = "a" * 64
    frame = messages.Frame.__struct_fields__
    assert "by_status" in frame
    made: list[messages.Up | messages.Down] = [
        messages.Ping("r", 1), messages.Pong("r", 1, 2), messages.LoadPiece("r", 0, 0, 2, b"x" * 9),
        messages.ShareRefused("r", 0, "no"), messages.Go("r", 5), messages.Lease("r"),
        messages.StopShard("r", 1.0, "why"), messages.Release("r"), messages.Died("r", 0, "gone"),
        messages.Done("r", 0, 1, sha256, {"shard": 0, "cores": {"own_s": 1.0}}),
    ]  # fmt: skip
    return [messages.encode(message) for message in made]


def _part_seeds() -> list[bytes]:
    content = io.BytesIO()
    requests, chunks = np.zeros(2, REQUESTS), np.zeros(3, CHUNKS)
    requests["request_id"] = [0, 1]
    words = np.array([""])
    np.savez(content, requests=requests, chunks=chunks, errors=words, remotes=words)
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    return [content.getvalue(), empty.getvalue()]


def _frame_seeds() -> list[bytes]:
    plain = [
        msgspec.msgpack.encode(message)
        for message in (
            ["client_ready", "2.47.0", "w"], ["heartbeat", {"state": "ready"}, "w"],
            ["slobench_up", b"x" * 20, "w"], ["stats", {"__datetime__": True, "as_str": "x"}, "w"],
            ["stats", {"__ObjectId__": True, "as_str": "x"}, "w"],
        )
    ]  # fmt: skip
    seal = Sealer(b"s" * 32, b"up", 1).seal
    return [*plain, *(seal(b"w", data) for data in plain)]


def _scenario_seeds() -> list[bytes]:
    folder = Path(__file__).parent.parent / "scenarios"
    bad = (GOLDEN / "bad_scenarios").glob("*.yaml")
    return [
        *(path.read_bytes() for path in [*sorted(folder.glob("*.yaml")), *sorted(bad)]),
        b"arrivals: {kind: poisson, rate: 1/s}\n",
    ]


PARSERS: Mapping[str, Parser] = {
    "response": Parser(_read_response, (), _response_seeds),
    "stream": Parser(_read_stream, (), _wire_seeds),
    "probe": Parser(_read_probe, (), _response_seeds),
    "metrics": Parser(
        lambda data: read_metrics(data.decode("utf-8", "replace")),
        (ValueError,),
        lambda: [
            b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{m="a"} 1.0\n'
            b"vllm:gpu_cache_usage_perc 0.5\nsglang:num_queue_reqs 2\n",
        ],
    ),
    "body": Parser(
        _read_body,
        (),
        lambda: [
            b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":5,"seed":1,'
            b'"stream":true,"stream_options":{"include_usage":true},"temperature":0.5,"top_k":3}',
            b'{"prompt":[1,2,3],"max_tokens":5,"stop":["a"],"ttft_slo_ms":5,"tenant":"x","n":1}',
            b'{"messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"top_p":1}',
            b'{"input":[{"role":"user","content":[{"type":"input_text","text":"a"}]}],"store":false,'
            b'"instructions":"b","max_output_tokens":5,"text":{"format":{"type":"text"}}}',
            b'{"system":"a","messages":[{"role":"user","content":"b"}],"max_tokens":5,'
            b'"stop_sequences":["c"],"thinking":{"type":"disabled"}}',
        ],
    ),
    "messages": Parser(_read_messages, (messages.Bad,), _message_seeds),
    "part": Parser(
        lambda data: check_part(data, np.array([0, 1], np.uint32)), (messages.Bad,), _part_seeds
    ),
    "trace": Parser(
        _read_trace,
        (),
        lambda: [
            *(path.read_bytes()[:4000] for path in sorted((GOLDEN / "traces").iterdir())),
            b'{"timestamp": 1, "prompt_tokens": 2, "completion_tokens": 3, "text": "a"}\n' * 2,
            b"arrival_time,isl,osl\n1,2,3\n2,3,4\n",
        ],
    ),
    "scenario": Parser(_read_scenario, (SlobenchError,), _scenario_seeds),
    "target": Parser(
        lambda data: read_target(data.decode("utf-8", "replace"), "t.yaml", {}),
        (SlobenchError,),
        lambda: [
            b"url: http://localhost:8000\nheaders: {x-a: b}\nextra_body: {a: 1}\n"
            b"labels: {engine: vllm, gpus: 2}\nmetrics_url: [http://h/metrics]\n",
            b"launch: {preset: vllm, model: m, command: [serve, --port, '{port}']}\napi: chat\n",
        ],
    ),
    "run": Parser(_read_run, (SlobenchError,), _run_seeds),
    "zmq": Parser(_read_frame, (), _frame_seeds),
}
assert shipped_scenarios(), "the seeds are shipped"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("parsers", nargs="*", choices=[*PARSERS, []], help="default: all")
    parser.add_argument("--seconds", type=float, default=10, help="for each parser")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "big"))
    parser.add_argument("--runs", type=int, help="inputs for each parser, instead of --seconds")
    given = parser.parse_args(arguments)
    n_failed = 0
    for name in given.parsers or PARSERS:
        n, problem = fuzz(name, given.seconds, given.seed, given.runs)
        n_failed += problem is not None
        sys.stdout.write(f"{name:<10} {n:>9} inputs, seed {given.seed}: {problem or 'ok'}\n")
        sys.stdout.flush()
    return min(1, n_failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
