"""Prompt lengths are measured while the preflight's completion is still in progress."""

import asyncio
import json

from loadgen.workload.prompts import RenderedPrompt
from targets.endpoint import read_target
from targets.openai_completions import OpenAICompletions
from targets.preflight import preflight
from targets.preflight_result import CharacterFit

HEAD = (
    b"HTTP/1.1 %d X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"connection: close\r\n\r\n"
)


def event(**detail):
    data = b"data: " + json.dumps(detail).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


TOKEN = event(choices=[{"text": "x", "finish_reason": None}])
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class CountingServer:
    """Counts a token per four characters and three for a template. It holds back the completion's
    end until `n_parallel` requests about lengths have arrived. If `is_breaking`, that end is an
    error and those requests get no answer."""

    def __init__(self, is_refusing=False, is_breaking=False, n_parallel=2):
        self.n_parallel = n_parallel
        self.is_refusing, self.is_breaking = is_refusing, is_breaking
        self.n_refused = self.n_length_requests = 0
        self.is_complete = False
        self.all_came = asyncio.Event()
        self.answering = set()

    async def answer(self, reader, writer):
        self.answering.add(asyncio.current_task())
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the reachability check sends nothing
            writer.close()
            return
        if head.startswith(b"GET"):
            body = b'{"data":[{"id":"m"}]}'
            writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            await self._complete(json.loads(await reader.readexactly(length)), reader, writer)
        await writer.drain()
        writer.close()

    async def _complete(self, body, reader, writer):
        end = event(choices=[], usage={"prompt_tokens": len(body["prompt"]) // 4 + 3}) + END
        if body["max_tokens"] > 1:
            writer.write(HEAD % 200 + TOKEN)
            await self.all_came.wait()
            self.is_complete = True
            writer.write(event(error={"message": "no"}) + END if self.is_breaking else TOKEN + end)
            return
        self.n_length_requests += 1
        if self.n_length_requests == self.n_parallel:
            self.all_came.set()
        if self.is_refusing and not self.is_complete:
            self.n_refused += 1
            writer.write(HEAD % 429 + b"0\r\n\r\n")
        elif self.is_breaking:
            assert await reader.read() == b""  # until the client has closed the connection
        else:
            writer.write(HEAD % 200 + TOKEN + end)


def run_preflight(calibration=None, **behaviour):
    async def run():
        server = CountingServer(**behaviour)
        async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            result = await preflight(
                read_target(f"url: http://127.0.0.1:{port}\n", "t.yaml", {}),
                OpenAICompletions(),
                max_input_tokens=40,
                max_output_tokens=16,
                timeout_s=5.0,
                text_of=lambda n_chars: "four" * (n_chars // 4),
                **(calibration or {}),
            )
            async with asyncio.timeout(5.0):
                await asyncio.gather(*server.answering)
        return result, server

    return asyncio.run(run())


def test_lengths_are_requested_before_the_completion_has_ended():
    result, _ = run_preflight()
    assert result.fatal is None  # else the completion would have overrun its deadline
    assert result.fit == CharacterFit(3.0, 0.25)


def test_the_first_prompts_are_counted_with_the_samples_and_only_once():
    first = (RenderedPrompt("four" * 10), RenderedPrompt("four" * 20))

    def steps(line, limit_tokens):
        return True, f"{line} {(yield first)} {(yield (RenderedPrompt('four'),))}"

    body = {"calibrate": steps, "first_prompts": lambda limit_tokens: first}
    result, server = run_preflight(body, n_parallel=4)
    detail = {check.check: check.detail for check in result.checks}["prompt_fit"]
    assert detail == f"{CharacterFit(3.0, 0.25)} (13, 23) (4,)"
    assert server.n_length_requests == 5


def test_lengths_rejected_during_the_completion_are_requested_again_after_it():
    result, server = run_preflight(is_refusing=True)
    assert result.fatal is None
    assert server.n_refused >= 1
    assert result.fit == CharacterFit(3.0, 0.25)


def test_a_failed_completion_leaves_no_request_behind():
    result, server = run_preflight(is_breaking=True)
    assert "reported an error in the stream: no" in result.fatal
    assert server.n_length_requests == 2
    assert result.fit is None
    assert {check.check: check.detail for check in result.checks}["prompt_fit"] == "not checked"
