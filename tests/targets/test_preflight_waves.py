"""A slow server is waited for twice, whatever the number of the preflight's requests."""

import asyncio
import json

import pytest

from loadgen.workload.calibration import Calibration
from loadgen.workload.prompts import Prompts
from loadgen.workload.scenario import scenario_from_flags
from loadgen.workload.schedule import make_plan
from targets.base import Request
from targets.endpoint import read_target
from targets.openai_completions import OpenAICompletions
from targets.preflight import preflight
from targets.preflight_result import RunRequest

TTFT_S = 0.3
HEAD = b"HTTP/1.1 %d X\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
TOKEN = {"choices": [{"text": "x", "finish_reason": None}]}


class SlowServer:
    """Counts a token per word and three for a template; answers each completion after TTFT_S.
    `waits` holds for each completion its place in the longest chain of completions of which each
    arrived after the answer to the one before. A prompt of more than `max_words` words and the
    field `refused` are refused. If `is_held`, the completion ends after the run's request came."""

    def __init__(self, refused="", max_words=10**9, is_held=False):
        self.is_held, self.run_request_came = is_held, asyncio.Event()
        self.refused, self.max_words = refused, max_words
        self.waits, self.bodies, self.n_answered = [], [], 0
        self.longest_answered = 0

    async def answer(self, reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:  # the reachability check sends nothing
            writer.close()
            return
        if head.startswith(b"GET"):
            body = b'{"data":[{"id":"m"}]}'
            writer.write(HEAD % (200, b"application/json", len(body)) + body)
        else:
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            body = json.loads(await reader.readexactly(length))
            answer = await self._complete(body)
            if body["max_tokens"] == 4:
                self.run_request_came.set()
            if self.is_held and body["max_tokens"] == 16:
                at = answer.index(b"}\n\n") + 3  # the end of the first event
                writer.write(answer[:at])
                await self.run_request_came.wait()
                answer = answer[at:]
            writer.write(answer)
        await writer.drain()
        writer.close()

    async def _complete(self, body):
        waits = self.longest_answered + 1
        self.waits.append(waits)
        self.bodies.append(body)
        n_words = len(body["prompt"].split())
        if self.refused in body or n_words > self.max_words:
            answer = json.dumps({"error": {"message": f"unknown: {self.refused}"}}).encode()
            return HEAD % (400, b"application/json", len(answer)) + answer
        await asyncio.sleep(TTFT_S)
        self.longest_answered = max(self.longest_answered, waits)
        usage = {"prompt_tokens": n_words + 3, "completion_tokens": body["max_tokens"]}
        events = [TOKEN] * body["max_tokens"] + [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        answer = "".join([*lines, "data: [DONE]\n\n"]).encode()
        return HEAD % (200, b"text/event-stream", len(answer)) + answer


def run_preflight(server, prompt_of_run=None):
    scenario = scenario_from_flags(rate="5/s", input_len=400, output_len=4, duration="2s")
    schedule = make_plan(scenario).schedule
    calibration = Calibration(Prompts(scenario.prompts, 0, b"preflight"), schedule)

    def payload(adapter):
        prompt = 400 * "w " if prompt_of_run is None else prompt_of_run()
        body = adapter.encode(Request(prompt=prompt, output_tokens=4)).body
        head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-length: {len(body)}\r\n\r\n"
        return (RunRequest("400 + 4 tokens", head.encode() + body),)

    async def run():
        async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            return await preflight(
                read_target(f"url: http://127.0.0.1:{port}\n", "t.yaml", {}),
                OpenAICompletions(),
                max_input_tokens=400,
                max_output_tokens=4,
                timeout_s=5.0,
                text_of=calibration.sample,
                calibrate=calibration.steps,
                first_prompts=calibration.early_prompts,
                requests_of=payload,
            )

    return asyncio.run(run())


def detail(result, name):
    return {check.check: check.detail for check in result.checks}[name]


def test_the_preflight_waits_for_a_slow_server_twice():
    server = SlowServer()
    result = run_preflight(server).or_raise()
    assert max(server.waits) == 2
    assert server.bodies[0]["max_tokens"] == 16  # the completion leaves first
    assert detail(result, "prompt_fit").startswith("prompt lengths exact to ≤ 1 token")
    assert detail(result, "run_requests") == "accepted, of 400 + 4 tokens"


@pytest.mark.parametrize("field", ["ignore_eos", "stream_options"])
def test_prompts_are_counted_again_without_a_rejected_field(field):
    server = SlowServer(refused=field)
    result = run_preflight(server).or_raise()
    assert max(server.waits) == 2  # a rejection is immediate
    if field == "ignore_eos":
        assert detail(result, "prompt_fit").startswith("prompt lengths exact to ≤ 1 token")
    assert detail(result, "run_requests") == "accepted, of 400 + 4 tokens"


def test_the_end_of_the_completion_is_not_waited_for():
    server = SlowServer(is_held=True)
    result = run_preflight(server).or_raise()  # else the completion would overrun its deadline
    assert detail(result, "run_requests") == "accepted, of 400 + 4 tokens"


def test_a_request_refused_with_the_unverified_fit_is_sent_with_the_verified_fit():
    prompts = [401 * "w ", 399 * "w "]
    server = SlowServer(max_words=400)
    result = run_preflight(server, lambda: prompts.pop(0)).or_raise()
    assert not prompts
    assert detail(result, "run_requests") == "accepted, of 400 + 4 tokens"
