"""Preflight: a few small requests that tell, before a run, whether measuring this endpoint can mean
anything.

It returns every check in a fixed order, whatever happens, and never raises for what the server
does: a doctor prints all of them. Where a run would be meaningless, `fatal` is one line saying
what, where and what to do, and `or_raise` raises it as TargetError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from loadgen.errors import nearest
from targets.base import Adapter, Request, Usage
from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.preflight_result import (
    CHECKS,
    CharacterFit,
    Preflight,
    PreflightCheck,
    without_refused,
)
from targets.probe_request import (
    Models,
    ProbeAnswer,
    connect,
    connect_problem,
    fetch_models,
    is_redirect,
    is_refused,
    send_probe,
)
from targets.prompt_lengths import Ahead, Calibrate, LengthProbe, MeasuredLengths, point_of

_TOKENS = 16  # of the probe's answer
_ATTEMPTS = 3  # a server may fail one request in ten and still be worth measuring
_PAUSE_S = 0.05  # between them, where there was no connection
_TEXT = "The quick brown fox jumps over the lazy dog, and then it does so once more. "


async def preflight(
    endpoint: Endpoint,
    adapter: Adapter,
    *,
    max_input_tokens: int,
    max_output_tokens: int,
    timeout_s: float = 30.0,
    text_of: Callable[[int], str] | None = None,
    calibrate: Calibrate | None = None,
    ahead: Ahead = lambda limit: (),
    on_timed: Callable[[], None] = lambda: None,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Preflight:
    """Probe an endpoint with `adapter`, whose `model` may be empty (then the first served one is
    taken).

    `max_…_tokens` are the longest the scenario asks for. `text_of(n)` gives about n characters of
    the workload's own text, for the prompt fit; without it there is none. `calibrate` asks on from
    there, `ahead` says what of that can be asked beside it; all of it is asked from the
    completion's first token on. `on_timed` is called then: what is told of times is known.
    `timeout_s` bounds every exchange, and an exchange that overruns it ends the preflight. Where a
    connection is refused or closed without a word, it is tried twice again, each time after a
    `pause`.
    """
    probe = _Probe(endpoint, adapter, timeout_s, pause)
    try:
        probe.done("reachable", await probe.reach())
        async with HttpSession(endpoint.route) as session:
            await probe.choose_model(session)
            probe.check_length(max_input_tokens, max_output_tokens)
            prompt = (text_of(len(_TEXT)) if text_of is not None else "") or _TEXT
            if text_of is None:
                probe.judge(await probe.complete(session, prompt, on_timed))
                return probe.result(None)
            lengths = LengthProbe(
                partial(probe.ask, session),
                text_of,
                calibrate,
                max_input_tokens,
                probe.max_model_len,
                ahead,
            )

            def begin() -> None:
                on_timed()
                lengths.begin()

            async with lengths:
                answer = await probe.complete(session, prompt, begin)
                probe.judge(answer)
                probe.note_lengths(await lengths.found(point_of(prompt, answer)))
    except _Stop as stop:
        probe.note(stop.check, False, stop.detail)
        return probe.result(f"{endpoint.url}: {endpoint.redact(stop.detail)}")
    return probe.result(None)


class _Stop(Exception):
    """A run against this endpoint would be meaningless; leaves the probe, never this module."""

    def __init__(self, check: str, detail: str) -> None:
        super().__init__(detail)
        self.check, self.detail = check, detail


@dataclass
class _Probe:
    endpoint: Endpoint
    adapter: Adapter
    timeout_s: float
    pause: Callable[[float], Awaitable[None]]
    found: dict[str, PreflightCheck] = field(default_factory=dict)
    models: Models = field(default_factory=lambda: Models(0, {}))
    fit: CharacterFit | None = None

    def note(self, name: str, ok: bool | None, detail: str) -> None:
        assert name in CHECKS, name
        self.found[name] = PreflightCheck(name, ok, self.endpoint.redact(detail))

    def done(self, name: str, detail: str) -> None:
        self.note(name, True, detail)

    @property
    def max_model_len(self) -> int | None:
        return self.models.max_len.get(self.adapter.model)

    def result(self, fatal: str | None) -> Preflight:
        checks = (
            self.found.get(name, PreflightCheck(name, None, "not checked")) for name in CHECKS
        )
        return Preflight(self.adapter, tuple(checks), self.fit, self.max_model_len, fatal)

    async def reach(self) -> str:
        for left in reversed(range(_ATTEMPTS)):
            try:
                took_s = await connect(self.endpoint, self.timeout_s)
                break
            except OSError as error:  # also what runs out of time
                if not left or not is_refused(error):
                    problem = connect_problem(error, self.endpoint, self.timeout_s)
                    raise _Stop("reachable", problem) from None
            await self.pause(_PAUSE_S)
        proxy = self.endpoint.route.proxy
        through = f" through proxy {proxy.url}" if proxy else ""
        return f"{self.endpoint.url}{through}, connected in {took_s * 1e3:.1f} ms"

    async def choose_model(self, session: HttpSession) -> None:
        """The adapter's model, else the endpoint's, else the first that is served."""
        for left in reversed(range(_ATTEMPTS)):
            self.models = await fetch_models(session, self.endpoint, self.timeout_s)
            if not left or not self.models.is_transient:
                break
            await self.pause(_PAUSE_S)
        if self.models.status in (401, 403):
            raise _Stop("models", self._refused(self.models.status))
        if is_redirect(self.models.status):
            raise _Stop("models", f"GET /v1/models {self.models.problem}")
        wanted, ids = self.adapter.model or self.endpoint.model, self.models.ids
        if not wanted and not ids:
            why = self.models.problem or "lists no model"
            raise _Stop("models", f"GET /v1/models {why}; name the model with --model")
        chosen = {"model": wanted or ids[0], "sends_slos": self.models.is_bundled}
        self.adapter = self.adapter.model_copy(update=chosen)
        if not wanted:
            others = f", the first of {len(ids)}; choose with --model" if len(ids) > 1 else ""
            self.done("models", f"{ids[0]}{others}")
        elif wanted in ids:
            self.done("models", wanted)
        elif ids:
            self.note("models", False, f"'{wanted}' is not listed; {nearest(wanted, ids)}")
        else:
            self.note("models", None, f"{wanted}; GET /v1/models {self.models.problem}")

    def note_lengths(self, found: MeasuredLengths) -> None:
        self.fit = found.fit
        self.note("prompt_fit", found.ok, found.detail)

    async def complete(
        self, session: HttpSession, prompt: str, on_token: Callable[[], None]
    ) -> ProbeAnswer:
        """One small streamed answer, with whatever the server refuses to be asked switched off;
        `on_token` is called once that is known and a token is in."""
        given, failed = self.adapter, 0
        first: ProbeAnswer | None = None
        if given.include_usage:
            self.adapter = given.model_copy(update={"continuous_usage": True})
        while True:
            request = Request(prompt=prompt, output_tokens=_TOKENS)
            answer = await self.ask(session, request, on_token)
            first = first or answer
            lesser = without_refused(self.adapter, answer.status, answer.head)
            if lesser is not None:
                self.adapter = lesser
            elif answer.problem is not None and answer.is_transient and failed < _ATTEMPTS - 1:
                failed += 1
                if not answer.status:
                    await self.pause(_PAUSE_S)
            else:
                break
        if answer.problem is not None:
            self.adapter = given
            self._explain(first if first.status == answer.status else answer)
        again = f"; {failed} attempts failed before" if failed else ""
        self.done("completion", f"{answer.n_token_events} chunks in {answer.total_s:.2g} s{again}")
        return answer

    def judge(self, answer: ProbeAnswer) -> None:
        """What a good answer tells: streaming, usage, lengths, finish."""
        self._judge_streaming(answer)
        usage = answer.usage
        asked_eos, tokens = self.adapter.ignore_eos, usage.output_tokens if usage else None
        self._judge_usage(answer, usage)
        if not asked_eos:
            self.note("ignore_eos", None, "refused or not asked: output_tokens are at most")
        elif tokens is not None and tokens < _TOKENS:
            detail = f"ignored ({tokens} of {_TOKENS} tokens came): output_tokens are at most"
            self.note("ignore_eos", False, detail)
        elif tokens is not None and tokens > _TOKENS:
            detail = f"{tokens} tokens came of {_TOKENS} asked: the server ignores max_tokens"
            self.note("ignore_eos", False, detail)
        else:
            self.done("ignore_eos", "accepted: output_tokens are exact")
        reasons = [d.finish_reason.name for d in answer.deltas if d.finish_reason]
        if reasons:
            self.done("finish_reason", reasons[-1])
        else:
            self.note("finish_reason", False, "none came: a cut stream cannot be told from a whole")

    def _judge_streaming(self, answer: ProbeAnswer) -> None:
        n, detail = answer.n_token_events, f"{answer.n_token_events} chunks"
        if n == 0:
            raise _Stop("streaming", "the answer carried no token: no content, no reasoning")
        if n == 1:
            self.note("streaming", False, "all tokens came in one chunk: TPOT cannot be measured")
        elif len(answer.token_reads_s) == 1:
            detail += " in one read: a proxy may hold the stream back, or the server is very fast"
            self.note("streaming", None, detail)
        elif answer.content_type != "text/event-stream":
            self.note("streaming", None, f"{detail}, but content-type is {answer.content_type}")
        else:
            self.done("streaming", f"{detail}, first token after {answer.first_token_s:.2g} s")

    def _judge_usage(self, answer: ProbeAnswer, usage: Usage | None) -> None:
        if usage is None or usage.output_tokens is None:
            self.adapter = self.adapter.model_copy(update={"continuous_usage": False})
            self.note("usage", False, "not sent: output tokens are counted by chunks")
            return
        running = sum(d.is_token and d.usage is not None for d in answer.deltas)
        if running < answer.n_token_events:  # accepted but not done: do not ask for it in the run
            self.adapter = self.adapter.model_copy(update={"continuous_usage": False})
        each = "on every chunk" if self.adapter.continuous_usage else "at the end"
        self.done("usage", f"{usage.input_tokens} in, {usage.output_tokens} out, {each}")

    def check_length(self, max_input_tokens: int, max_output_tokens: int) -> None:
        limit, total = self.max_model_len, max_input_tokens + max_output_tokens
        if limit is None:
            self.note("max_model_len", None, f"not stated; the scenario needs up to {total} tokens")
        elif total > limit:
            raise _Stop(
                "max_model_len",
                f"the scenario asks for up to {max_input_tokens} + {max_output_tokens} tokens and "
                f"'{self.adapter.model}' takes {limit}: lower the scenario's max, or raise the "
                "server's --max-model-len",
            )
        else:
            self.done("max_model_len", f"{limit}; the scenario needs up to {total} tokens")

    async def ask(
        self, session: HttpSession, request: Request, on_token: Callable[[], None] = lambda: None
    ) -> ProbeAnswer:
        return await send_probe(
            session, self.endpoint, self.adapter, request, self.timeout_s, on_token
        )

    def _explain(self, answer: ProbeAnswer) -> None:
        """Stop with what a failed completion means and what to do about it."""
        path = self.adapter.encode(Request("", 1)).path
        problem, status = f"POST {path} {answer.problem}", answer.status
        if status in (401, 403):
            raise _Stop("completion", self._refused(status))
        if status == 404 and self.models.ids and self.adapter.model not in self.models.ids:
            known = nearest(self.adapter.model, self.models.ids)
            raise _Stop("completion", f"model '{self.adapter.model}' is not served; {known}")
        if status == 404:
            hint = f"check the URL (with or without /v1) and api: {self.endpoint.api}"
            raise _Stop("completion", f"{problem}; {hint}")
        if status == 200 and not answer.deltas and "json" in answer.content_type:
            raise _Stop("streaming", f"{problem}; the server ignores stream: true")
        if status == 200 and not answer.deltas:
            raise _Stop("streaming", f"{problem}; is the URL that of an OpenAI-compatible API?")
        raise _Stop("completion", problem + _hint(answer))

    def _refused(self, status: int) -> str:
        variable = self.endpoint.api_key_env or "OPENAI_API_KEY"
        if self.endpoint.has_key:
            return f"answered {status}: the API key in {variable} is refused; set another"
        return (
            f"answered {status}: no API key was sent; export {variable}=… or name "
            "another variable as api_key_env in a target file"
        )


def _hint(answer: ProbeAnswer) -> str:
    """What to do about a completion that failed for no reason of ours."""
    if is_redirect(answer.status):
        return ""
    if answer.status in (400, 422):
        return (
            "; change or (with null) remove the field it names through extra_body in a target file"
        )
    if answer.status == 429:
        return "; a rate limit applies, or the server is full: nothing under load can be measured"
    if answer.status == 0 and not answer.is_transient:
        return "; is the model loaded and the server idle?"
    return "; look into the server's log"
