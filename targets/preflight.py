"""The preflight: a few small requests before a run, which show whether this endpoint can be
measured.

It returns every check in a fixed order, in every case, so that a doctor can print them all, and
never raises for the behaviour of the server. If a run would be meaningless, `fatal` is one line
with the place, the problem and the remedy; `Preflight.or_raise` raises it as TargetError.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loadgen.errors import nearest
from targets.base import Adapter, Request, is_refusal
from targets.endpoint import Endpoint
from targets.http_session import HttpSession
from targets.preflight_result import (
    CHECKS,
    CHECKS_WITHOUT_TOKENS,
    CharacterFit,
    FieldChange,
    Longest,
    Preflight,
    PreflightCheck,
    RunRequest,
    after_rejection,
    fields_check,
    unchecked,
)
from targets.probe_request import (
    ABSENT,
    Models,
    ProbeAnswer,
    connect,
    connect_problem,
    fetch_models,
    first_token_of,
    is_redirect,
    is_refused,
    send_probe,
    speaks_tls,
)
from targets.prompt_lengths import Calibrate, FirstPrompts, LengthProbe, point_of
from targets.readiness import STARTING

_TOKENS = 16  # of the completion
_MOST_CANDIDATES = 8  # models that are tried
_SHOWN_CHARS = 80  # of the reason why a model was not taken
_ATTEMPTS = 3  # a server may fail one request in ten and still be worth measuring
_PAUSE_S = 0.05  # before another attempt, if there was no connection
RequestsOf = Callable[[Adapter], Sequence[RunRequest]]
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
    first_prompts: FirstPrompts = lambda limit: (),
    temperature: float = 0.0,
    requests_of: RequestsOf | None = None,
    longest: Longest | None = None,
    on_first_token: Callable[[], None] = lambda: None,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Preflight:
    """Check an endpoint with `adapter`; if its `model` is empty, the first served model is used.

    `max_…_tokens` are the longest lengths of the scenario, of the `longest` request or, without
    it, together in a request. `text_of(n)` returns about n characters
    of the workload's own text for the prompt fit, which is left out without it. `calibrate` and
    `first_prompts` extend the fit (`LengthProbe`). `on_first_token` is called at the completion's
    first token: all times in the result have been measured.
    `temperature` is that of the run's requests; `requests_of` encodes some of them, the ordinary
    request first, and each is sent up to its first token.

    The requests form two waves, so that a slow server is waited for twice: the completion with the
    prompts of the fit, then the run's requests with the prompts that verify the fit. The second
    wave begins at the completion's first token at the earliest and does not wait for its end: the
    run's requests have every field that was accepted then.
    `timeout_s` bounds each request; a request that overruns it ends the preflight. A connection
    that is refused, or closed without an answer, is tried twice more, each time after a `pause`.
    """
    async with HttpSession(endpoint.route) as session:
        run = _Run(endpoint, adapter, timeout_s, temperature, pause, session)
        try:
            await run.check_reachable()
            prompt = (text_of(len(_TEXT)) if text_of is not None else "") or _TEXT
            lengths_needed = longest or Longest(max_input_tokens, max_output_tokens)
            candidates = await run.choose_model()
            if len(candidates) > 1:
                await run.choose_answering_model(candidates, lengths_needed, prompt)
            run.check_length(lengths_needed)
            if text_of is None:
                run.check_answer(await run.complete(prompt, on_first_token))
                return run.result(None)
            lengths = LengthProbe(
                run.send, text_of, calibrate, max_input_tokens, run.max_model_len, first_prompts
            )

            is_accepted = asyncio.Event()

            def on_token() -> None:
                on_first_token()
                is_accepted.set()

            async def second_wave() -> tuple[Sequence[RunRequest], list[ProbeAnswer]]:
                await is_accepted.wait()
                await lengths.fitted()
                requests = () if requests_of is None else requests_of(run.adapter)
                return requests, await run.first_tokens(requests)

            async with lengths:
                sent = asyncio.create_task(second_wave())
                try:
                    answer = await run.complete(prompt, on_token, lengths.start)
                    run.check_answer(answer)
                    run.fit, ok, detail = await lengths.result(point_of(prompt, answer), sent)
                    run.note("prompt_fit", ok, detail)
                    requests, answers = await sent
                finally:
                    sent.cancel()
                    await asyncio.wait([sent])
            if requests_of is not None:
                if any(answer.problem is not None for answer in answers):
                    requests = requests_of(run.adapter)  # with the verified fit
                    answers = await run.first_tokens(requests)
                run.check_run_requests(requests, answers)
        except _Stop as stop:
            run.note(stop.check, False, stop.detail, is_stop=True)
            return run.result(f"{endpoint.shown_url}: {endpoint.redact(stop.detail)}")
        return run.result(None)


class _Stop(Exception):
    """A run against this endpoint would be meaningless; does not leave this module."""

    def __init__(self, check: str, detail: str, *, is_of_model: bool = False) -> None:
        super().__init__(detail)
        self.check, self.detail = check, detail
        self.is_of_model = is_of_model  # another model of the same server may do


@dataclass
class _Run:
    """A preflight in progress: the checks so far, and the adapter without rejected features."""

    endpoint: Endpoint
    adapter: Adapter
    timeout_s: float
    temperature: float
    pause: Callable[[float], Awaitable[None]]
    session: HttpSession
    checks: dict[str, PreflightCheck] = field(default_factory=dict)
    models: Models = field(default_factory=lambda: Models(0, {}))
    fit: CharacterFit | None = None
    waits_s: list[float] = field(default_factory=list)  # to first tokens

    def note(self, name: str, ok: bool | None, detail: str, *, is_stop: bool = False) -> None:
        assert name in (*CHECKS, "results"), name
        detail = self.endpoint.redact(detail)
        self.checks[name] = PreflightCheck(name, ok, detail, is_stop=is_stop)

    @property
    def max_model_len(self) -> int | None:
        return self.models.max_len.get(self.adapter.model)

    def result(self, fatal: str | None) -> Preflight:
        names = CHECKS_WITHOUT_TOKENS if self.adapter.results else CHECKS
        checks = (self.checks.get(name) or unchecked(name) for name in names)
        models = self.models.max_len if self.models.status == 200 else None
        waits_s = [seconds for seconds in self.waits_s if math.isfinite(seconds)]
        longest_s = max(waits_s, default=0.0)
        return Preflight(
            self.adapter, tuple(checks), self.fit, self.max_model_len, fatal, models, longest_s
        )

    async def check_reachable(self) -> None:
        for left in reversed(range(_ATTEMPTS)):
            try:
                took_s = await connect(self.endpoint, self.timeout_s)
                break
            except OSError as error:  # TimeoutError too
                if not left or not is_refused(error):
                    problem = connect_problem(error, self.endpoint, self.timeout_s)
                    raise _Stop("reachable", problem) from None
            await self.pause(_PAUSE_S)
        proxy = self.endpoint.route.proxy
        through = f" through proxy {proxy.url}" if proxy else ""
        detail = f"{self.endpoint.shown_url}{through}, connected in {took_s * 1e3:.1f} ms"
        self.note("reachable", True, detail)

    async def choose_model(self) -> list[str]:
        """Choose the adapter's model, else the endpoint's, else the first that is served. Returns
        the models to choose from, if none is named."""
        for left in reversed(range(_ATTEMPTS)):
            self.models = await fetch_models(self.session, self.endpoint, self.timeout_s)
            if not left or not self.models.is_transient:
                break
            await self.pause(_PAUSE_S)
        is_unclear = self.models.status in (0, 400)  # no answer, or one to bytes that are no TLS
        if is_unclear and await speaks_tls(self.endpoint, self.timeout_s):
            raise _Stop("reachable", "the port speaks TLS; write https:// instead of http://")
        if self.models.status in (401, 403):
            raise _Stop("models", self._key_problem(self.models.status))
        if is_redirect(self.models.status):
            raise _Stop("models", f"{self.models.request} {self.models.problem}")
        deployment = self.endpoint.address.deployment
        name, ids = self.adapter.model or self.endpoint.model or deployment, self.models.ids
        reason = self.models.problem or "lists no model"
        if not name and not ids:
            is_starting = self.models.status in STARTING
            remedy = _READY if is_starting else "; name the model with --model"
            raise _Stop("models", f"{self.models.request} {reason}{remedy}")
        changes = {"model": name or ids[0], "sends_slos": self.models.is_bundled}
        if ids and hasattr(self.adapter, "version"):
            changes["version"] = self.models.version
        self.adapter = self.adapter.model_copy(update=changes)
        if not name:
            self.note("models", True, ids[0])
        elif name == deployment:
            self.note("models", None, f"{name}, the deployment of the URL")
        elif name in ids:
            self.note("models", True, name)
        elif ids:
            self.note("models", False, f"'{name}' is not listed; {nearest(name, ids)}")
        else:
            self.note("models", None, f"{name}; {self.models.request} {reason}")
        return [] if name else ids

    async def choose_answering_model(
        self, candidates: Sequence[str], lengths: Longest, prompt: str
    ) -> None:
        """Choose the first candidate that takes these lengths and answers a request: the list may
        begin with an embedding model."""
        given, refusals, n = self.adapter, dict[str, str](), len(candidates)
        for name in candidates[:_MOST_CANDIDATES]:
            self.adapter = given.model_copy(update={"model": name})
            try:
                self.check_length(lengths)
                await self.complete(prompt)
            except _Stop as stop:
                if stop.check == "completion" and not stop.is_of_model:
                    raise
                refusals[name] = stop.detail.removeprefix(f"{self._call()} ")[:_SHOWN_CHARS]
                continue
            because = f" ({_by_reason(refusals)})" if refusals else ""
            words = f"{name}, the first of {n} that answers{because}; choose with --model"
            self.note("models", True, words)
            return
        first = "" if n <= _MOST_CANDIDATES else f"first {_MOST_CANDIDATES} of "
        problem = f"none of the {first}{n} listed models answers {self._call()}"
        raise _Stop("models", f"{problem} ({_by_reason(refusals)}); name the model with --model")

    def check_length(self, longest: Longest) -> None:
        limit, lengths = self.max_model_len, (longest.input_tokens, longest.output_tokens)
        total = self.adapter.sequence_tokens(*lengths)
        if limit is None:
            self.note("max_model_len", None, f"not stated; the scenario needs up to {total} tokens")
        elif total > limit:
            needed = f"{total if self.adapter.results else '{} + {}'.format(*lengths)} tokens"
            subject = f"{longest.place} needs" if longest.place else "the scenario needs up to"
            remedy = "remove the line" if longest.place else "lower the scenario's max"
            raise _Stop(
                "max_model_len",
                f"{subject} {needed} and '{self.adapter.model}' takes {limit}: {remedy}, or raise "
                "the server's --max-model-len",
            )
        else:
            self.note("max_model_len", True, f"{limit}; the scenario needs up to {total} tokens")

    async def complete(
        self,
        prompt: str,
        on_token: Callable[[], None] = lambda: None,
        begin: Callable[[], None] = lambda: None,
    ) -> ProbeAnswer:
        """A small streamed answer. While the server rejects the request, it is sent again with a
        further field changed. `on_token` is called once the accepted fields are established, at the
        tokens of an accepted request or after it. `begin` starts requests with the same fields:
        with the first request, and again whenever fields were changed."""
        given, n_failed = self.adapter, 0
        absent: ProbeAnswer | None = None  # the 404 of the version that was tried first
        begun: Adapter | None = None
        changes: list[FieldChange] = []
        if given.include_usage and given.stream:
            self.adapter = given.model_copy(update={"continuous_usage": True})
        whole = self.adapter
        request = Request(prompt=prompt, output_tokens=_TOKENS, temperature=self.temperature)
        while True:
            is_sure = all(change.is_named for change in changes)
            if is_sure and begun != self.adapter:
                begun = self.adapter
                begin()  # its first request leaves after the completion
            answer = await self.send(request, on_token if is_sure else lambda: None)
            change = after_rejection(self.adapter, answer.status, answer.head)
            if change is not None:
                changes.append(change)
                self.adapter = self.adapter.model_copy(update={change.field: change.value})
            elif answer.status in ABSENT and absent is None and (other := self._other_version()):
                absent = answer
                self.adapter = self.adapter.model_copy(update={"version": other[0]})
            elif answer.problem is not None and answer.is_transient and n_failed < _ATTEMPTS - 1:
                n_failed += 1
                if not answer.status:
                    await self.pause(_PAUSE_S)
            else:
                break
        if answer.problem is not None:
            self.adapter = given
            if absent is not None and answer.status in ABSENT:
                answer = absent
            raise self._completion_stop(answer)
        guesses = [change.field for change in changes if not change.is_named]
        if guesses:
            answer = await self._restored(request, whole, guesses[:-1], answer)
            begin()
            on_token()
        check = fields_check(whole, self.adapter)
        self.note(check.check, check.ok, check.detail)
        plural = "s" if n_failed > 1 else ""
        before = f"; {n_failed} earlier attempt{plural} failed" if n_failed else ""
        words = f"{answer.n_token_events} chunks" if self.adapter.stream else "whole"
        detail = f"{words} in {answer.total_s:.2g} s{before}"
        self.note("completion", True, detail)
        return answer

    async def _restored(
        self, request: Request, whole: Adapter, fields: Sequence[str], answer: ProbeAnswer
    ) -> ProbeAnswer:
        """Sends each field again that was left out by guess, and keeps those that are accepted.
        Returns the answer to the last accepted request."""
        for name in fields:
            before = self.adapter
            self.adapter = before.model_copy(update={name: getattr(whole, name)})
            again = await self.send(request)
            if again.problem is None:
                answer = again
            else:
                self.adapter = before
        return answer

    async def send(
        self, request: Request, on_token: Callable[[], None] = lambda: None
    ) -> ProbeAnswer:
        return await send_probe(
            self.session, self.endpoint, self.adapter, request, self.timeout_s, on_token
        )

    async def first_tokens(self, requests: Sequence[RunRequest]) -> list[ProbeAnswer]:
        """The answers to requests of the run, sent together, each up to its first token."""
        answers = await asyncio.gather(*(self._first_token(r.payload) for r in requests))
        self.waits_s += [answer.first_token_s for answer in answers]
        return answers

    def check_run_requests(
        self, requests: Sequence[RunRequest], answers: Sequence[ProbeAnswer]
    ) -> None:
        """Check that requests are accepted as the run sends them; stops if the first is refused."""
        if not requests:
            self.note("run_requests", None, "not checked: recorded prompts that are not salted")
            return
        for request, answer in zip(requests, answers, strict=True):
            if answer.problem is None:
                continue
            problem = f"a request of {request.lengths} {answer.problem}"
            if is_refusal(answer.status) and request is requests[0]:
                raise _Stop(
                    "run_requests",
                    f"the run's requests are refused, the preflight's were not: {problem}"
                    f"{_remedy(answer)}",
                )
            self.note("run_requests", False, problem)
            return
        lengths = " and ".join(request.lengths for request in requests)
        self.note("run_requests", True, f"accepted, of {lengths}")

    async def _first_token(self, payload: bytes) -> ProbeAnswer:
        for left in reversed(range(_ATTEMPTS)):
            answer = await first_token_of(
                self.session, self.endpoint, self.adapter, payload, self.timeout_s
            )
            if answer.problem is None or not answer.is_transient or not left:
                break
        return answer

    def check_answer(self, answer: ProbeAnswer) -> None:
        """Check streaming, usage, length and finish reason of a usable answer."""
        self.waits_s.append(answer.first_token_s)
        if self.adapter.results:
            self._check_results(answer)
            return
        self._check_streaming(answer)
        self._check_usage(answer)
        stated = answer.usage.output_tokens if answer.usage else None
        is_counted = stated is not None and answer.is_possible(stated)
        tokens = stated if is_counted and stated is not None else answer.n_token_events
        if not self.adapter.requests_exact_lengths:
            self.note(
                "ignore_eos", None, "rejected or not requested: output_tokens are upper limits"
            )
        elif tokens < _TOKENS and not is_counted:
            detail = (
                f"not refused, but {tokens} chunks of unknown size came and {_TOKENS} tokens were "
                "requested: output_tokens may be upper limits"
            )
            self.note("ignore_eos", None, detail)
        elif tokens < _TOKENS:
            detail = f"ignored ({tokens} of {_TOKENS} tokens came): output_tokens are upper limits"
            self.note("ignore_eos", False, detail)
        elif tokens > _TOKENS:
            detail = f"{tokens} tokens came, {_TOKENS} were requested: max_tokens is ignored"
            self.note("ignore_eos", False, detail)
        elif not (self.adapter.has_exact_lengths or self.models.is_bundled):
            detail = (
                "not refused, but no field of this API: a server may ignore it, and output_tokens "
                "may be upper limits"
            )
            self.note("ignore_eos", None, detail)
        else:
            counted = "" if is_counted else f", by {tokens} chunks"
            self.note("ignore_eos", True, f"accepted: output_tokens are exact{counted}")
        reasons = [d.finish_reason.name for d in answer.deltas if d.finish_reason]
        missing = "missing: a cut stream looks complete"
        self.note("finish_reason", bool(reasons), reasons[-1] if reasons else missing)

    def _check_results(self, answer: ProbeAnswer) -> None:
        """Check an answer without tokens, whose number of results the codec has compared."""
        n_results = sum(delta.results for delta in answer.deltas)
        noun = self.adapter.results if n_results > 1 else self.adapter.results.removesuffix("s")
        detail = f"{n_results} {noun} an answer, without tokens: latency is end to end"
        self.note("results", True, detail)
        tokens = None if answer.usage is None else answer.usage.input_tokens
        stated = "not stated: input tokens are those of the plan"
        self.note(
            "usage", None if tokens is None else True, stated if tokens is None else f"{tokens} in"
        )

    def _check_streaming(self, answer: ProbeAnswer) -> None:
        n_chunks, detail = answer.n_token_events, f"{answer.n_token_events} chunks"
        if not self.adapter.stream and n_chunks:
            detail = "off (stream: false): answers have no TTFT, TPOT or ITL"
            self.note("streaming", None, detail)
            return
        if n_chunks == 0 and answer.hidden_tokens:
            detail = f"none of {_TOKENS} tokens was streamed: {answer.hidden_tokens} are reasoning"
            self.note("streaming", None, detail)
        elif n_chunks == 0:
            raise _Stop("streaming", "the answer has no token: no content, no reasoning")
        if n_chunks == 1:
            self.note("streaming", False, "all tokens came in one chunk: TPOT cannot be measured")
        elif len(answer.token_reads_s) == 1:
            detail += " in one read: a proxy may hold the stream back, or the server is very fast"
            self.note("streaming", None, detail)
        elif answer.content_type != "text/event-stream":
            self.note("streaming", None, f"{detail}, but content-type is {answer.content_type}")
        else:
            detail += f", first token after {answer.first_token_s:.2g} s"
            self.note("streaming", True, detail)

    def _check_usage(self, answer: ProbeAnswer) -> None:
        usage = answer.usage
        is_stated = usage is not None and usage.output_tokens is not None
        if (
            not is_stated or answer.n_counted_events < answer.n_token_events
        ):  # accepted but not sent
            self.adapter = self.adapter.model_copy(update={"continuous_usage": False})
        if usage is None or not is_stated:
            self.note("usage", False, "not sent: output tokens are counted by chunks")
            return
        if usage.output_tokens is not None and not answer.is_possible(usage.output_tokens):
            self.note(
                "usage",
                False,
                f"states {usage.output_tokens} tokens of an answer of {answer.n_token_events} "
                "chunks, which cannot be: output tokens are counted by chunks",
            )
            return
        where = "on every chunk" if self.adapter.continuous_usage else "at the end"
        self.note("usage", True, f"{usage.input_tokens} in, {usage.output_tokens} out, {where}")

    def _completion_stop(self, answer: ProbeAnswer) -> _Stop:
        """The meaning of a failed completion and the remedy."""
        problem, status = f"{self._call()} {answer.problem}", answer.status
        if status in (401, 403):
            return _Stop("completion", self._key_problem(status))
        if status == 404 and self.models.ids and self.adapter.model not in self.models.ids:
            name = self.adapter.model
            listed = nearest(name, self.models.ids)
            return _Stop("completion", f"model '{name}' is not served; {listed}")
        if status == 404:
            remedy = f"check the URL and api: {self.endpoint.api}"
            if others := self._other_version():
                remedy = f"{self._call(*others)} is absent too; {remedy}"
            return _Stop("completion", f"{problem}; {remedy}", is_of_model=True)
        if status == 200 and not answer.deltas and "json" in answer.content_type:
            return _Stop("streaming", f"{problem}; the server ignores stream: true")
        if status == 200 and not answer.deltas:
            return _Stop("streaming", f"{problem}; is the URL that of an OpenAI-compatible API?")
        is_of_model = is_refusal(status) or status in (500, 501)
        return _Stop("completion", problem + _remedy(answer), is_of_model=is_of_model)

    def _other_version(self) -> tuple[str, ...]:
        """The other version of the API that may follow the base; empty without one."""
        own = getattr(self.adapter, "version", None)
        return () if own is None else tuple(v for v in self.endpoint.address.versions if v != own)

    def _call(self, *version: str) -> str:
        """The method and the whole path of a completion, for messages; `version` replaces the
        adapter's."""
        adapter = self.adapter.model_copy(update={"version": version[0]} if version else {})
        request = adapter.encode(Request("", 1))
        return f"{request.method} {self.endpoint.address.path(request.path)}"

    def _key_problem(self, status: int) -> str:
        variable = self.endpoint.api_key_env or "OPENAI_API_KEY"
        if self.endpoint.has_key:
            return f"answered {status}: the API key in {variable} is refused; set another"
        return (
            f"answered {status}: no API key was sent; export {variable}=… or name "
            "another variable as api_key_env in a target file"
        )


def _by_reason(refusals: Mapping[str, str]) -> str:
    """`a, b: answered 400; c: …` from the reasons by model."""
    models: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        models.setdefault(reason, []).append(name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in models.items())


_READY = "; --wait-ready 5m waits until a server that is still loading answers"


def _remedy(answer: ProbeAnswer) -> str:
    """The remedy for a completion that failed in the server."""
    if is_redirect(answer.status):
        return ""
    if answer.status in (400, 422):
        return (
            "; change or (with null) remove the field it names through extra_body in a target file"
        )
    if answer.status == 402:
        return "; the account does not pay for requests: top it up"
    if answer.status in STARTING:
        return _READY
    if answer.status == 429:
        return "; a rate limit applies or the server is full: it cannot be measured under load"
    if answer.status == 0 and not answer.is_transient:
        return "; is the model loaded and the server idle?"
    return "; see the server's log"
