"""Attribution of each missed SLO to a cause. The causes are tried in this order:

1. request: even alone on the engine the request would have missed (by the cost model);
2. capacity: around that time more tokens arrived than the engine can compute;
3. policy: the request meets this SLO when the same requests are simulated under another batching
   mode. The simulation under the mode that served them must miss the SLO, too; otherwise it proves
   nothing about other modes;
4. interference: none of these. The attribution names the request that delayed it longest.

A caller sets a fifth cause, unsettled, if its simulations stopped too early to separate 3 from 4
(see `counterfactual`).

Pure: the simulation is passed in.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from typing import NamedTuple

from reference_engine.accounting.explain import Account
from reference_engine.state.cost_model import CostModel, StepShape
from reference_engine.state.steps import StepRecord

_WINDOW_S = 30.0


class MissCause(StrEnum):
    request = "request"
    capacity = "capacity"
    policy = "policy"
    interference = "interference"
    unsettled = "unsettled"


class Timing(NamedTuple):
    """Latencies of a request from its arrival (s); None for a first token or an end that it did not
    reach."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


Simulate = Callable[[str], Mapping[str, Timing]]  # batching mode → timings by request id
Reason = tuple[MissCause, str, str]  # cause, evidence, subject


class SloLimit(NamedTuple):
    """`ttft`, `tpot` or `e2e` (of a deadline) within `seconds`."""

    metric: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """The cost of an engine's steps, and its limits in sequences, in tokens per step and in tokens
    of KV."""

    cost: CostModel
    max_num_seqs: int
    step_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """A missed SLO and its cause. `was_s` is the latency, None if the first token or the end was
    never reached; `evidence` is a clause for users. `subject` is the mode that meets the SLO (cause
    policy) or the request that delayed this request longest (interference)."""

    request_id: str
    tenant: str
    slo: SloLimit
    was_s: float | None
    cause: MissCause
    evidence: str
    subject: str = ""

    def sentence(self) -> str:
        was = "never reached" if self.was_s is None else f"{self.was_s:.3g} s"
        return f"{self.slo.metric.upper()} {was} (SLO {self.slo.seconds:.3g} s): {self.evidence}"

    def as_json(self) -> dict[str, object]:
        """The keys of `/debug/misses` and `--misses --json`."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "slo": self.slo._asdict(),
            "was_s": self.was_s,
            "blame": str(self.cause),
            "because": self.evidence,
            "culprit": self.subject,
            "sentence": self.sentence(),
        }


class Attributor:
    """Attributes the misses of a run. `accounts` are all its requests. `simulate` is called for
    `control`, the mode that served them ("": not called), and for each of `modes`, in order; at
    most once for each, and only when a miss needs it. `steps` (level "full") show which prompts
    slowed a decode down."""

    def __init__(
        self,
        accounts: Iterable[Account],
        engine: EngineCapacity,
        simulate: Simulate | None = None,
        modes: Sequence[str] = (),
        steps: Sequence[StepRecord] = (),
        window_s: float = _WINDOW_S,
        control: str = "",
    ) -> None:
        self._accounts = sorted(accounts, key=lambda entry: entry.arrived_s)
        self._arrivals = [entry.arrived_s for entry in self._accounts]
        self._engine, self._steps, self._window_s = engine, steps, window_s
        self._simulate, self._modes = simulate, tuple(modes) if simulate is not None else ()
        self._control = control
        self._simulated: dict[str, Mapping[str, Timing]] = {}

    def misses(self) -> list[Attribution]:
        """Every missed SLO of the run, in order of arrival."""
        return [miss for entry in self._accounts for miss in self.attribute(entry)]

    def attribute(self, entry: Account) -> list[Attribution]:
        """The missed SLOs of a request."""
        misses = []
        for slo in missed_slos(entry):
            reason = (
                self._request(entry, slo)
                or self._capacity(entry)
                or self._policy(entry, slo)
                or self._interference(entry, slo)
            )
            was_s = _latency_s(timing(entry), slo)
            misses.append(Attribution(entry.request_id, entry.tenant, slo, was_s, *reason))
        return misses

    def _request(self, entry: Account, slo: SloLimit) -> Reason | None:
        alone = capped_by_actual(timing_alone(entry, self._engine), entry)
        alone_s = _latency_s(alone, slo)
        if alone_s is None or alone_s <= slo.seconds:
            return None
        return MissCause.request, f"even alone it takes {alone_s:.3g} s", ""

    def _capacity(self, entry: Account) -> Reason | None:
        begin_s, end_s = entry.arrived_s - self._window_s, entry.arrived_s + entry.queue_s
        first, last = bisect_left(self._arrivals, begin_s), bisect_right(self._arrivals, end_s)
        near = self._accounts[first:last] or [entry]
        n_tokens = sum(e.input_tokens - e.cached_tokens + e.output_tokens for e in near)
        begin_s = max(begin_s, near[0].arrived_s)
        arrived_per_s = n_tokens / max(end_s - begin_s, self._window_s)
        most_per_s = capacity_tokens_per_s(near, self._engine)
        if most_per_s is None or arrived_per_s <= most_per_s:
            return None
        arrived, most = _rounded(arrived_per_s), _rounded(most_per_s)
        evidence = f"{arrived} tokens/s arrived, the engine computes {most} at most"
        return MissCause.capacity, evidence, ""

    def _policy(self, entry: Account, slo: SloLimit) -> Reason | None:
        if self._modes and self._control and not self._is_reproduced(entry, slo):
            return None
        for mode in self._modes:
            would_s = self._simulated_s(mode, entry, slo)
            if would_s is not None and would_s <= slo.seconds:
                return MissCause.policy, f"under {mode} it would have been {would_s:.3g} s", mode
        return None

    def _is_reproduced(self, entry: Account, slo: SloLimit) -> bool:
        """Whether the request also misses the SLO when the mode that served it is simulated."""
        if entry.request_id not in self._timings(self._control):
            return False
        simulated_s = self._simulated_s(self._control, entry, slo)
        return simulated_s is None or simulated_s > slo.seconds

    def _simulated_s(self, mode: str, entry: Account, slo: SloLimit) -> float | None:
        times = self._timings(mode).get(entry.request_id)
        return None if times is None else _latency_s(times, slo)

    def _timings(self, mode: str) -> Mapping[str, Timing]:
        if mode not in self._simulated:
            assert self._simulate is not None, "there are no modes without a simulation"
            self._simulated[mode] = self._simulate(mode)
        return self._simulated[mode]

    def _interference(self, entry: Account, slo: SloLimit) -> Reason:
        blocked_s = defaultdict[str, float](float)
        for cause, seconds in entry.waits:
            if cause.blocker:
                blocked_s[cause.blocker] += seconds
        if slo.metric != "ttft":
            for name, seconds in slowed_by(entry, self._steps).items():
                blocked_s[name] += seconds
        if not blocked_s:
            return MissCause.interference, f"it {entry.sentence()}", ""
        blocker = max(blocked_s, key=lambda name: blocked_s[name])
        return (
            MissCause.interference,
            f"{blocker} delayed it by {blocked_s[blocker]:.3g} s",
            blocker,
        )


def missed_slos(entry: Account) -> list[SloLimit]:
    """The SLOs that a finished request missed. A request that was cancelled before a limit had
    passed did not miss it."""
    deadline_s = None if entry.deadline_s is None else entry.deadline_s - entry.arrived_s
    limits = (("ttft", entry.ttft_slo_s), ("tpot", entry.tpot_slo_s), ("e2e", deadline_s))
    slos = [SloLimit(metric, seconds) for metric, seconds in limits if seconds is not None]
    return [slo for slo in slos if not _is_met(entry, slo)]


def timing(entry: Account) -> Timing:
    """The latencies that a request had."""
    is_whole = entry.state in ("finished_stop", "finished_length")
    return Timing(entry.ttft_s, entry.tpot_s, entry.e2e_s if is_whole else None)


def timing_alone(entry: Account, engine: EngineCapacity) -> Timing:
    """The latencies that the request would have on an idle engine: its prompt in steps as long as
    the limit allows, then a token in each step. TPOT is None for fewer than two tokens."""
    ttft_s, done = 0.0, entry.cached_tokens
    while done < entry.input_tokens:
        n = min(engine.step_tokens, entry.input_tokens - done)
        ttft_s += engine.cost.estimate(StepShape(1, n, n * (done + n / 2)))
        done += n
    n_more = max(entry.output_tokens - 1, 0)
    context = entry.input_tokens + n_more // 2
    tpot_s = engine.cost.estimate(StepShape(n_seqs=1, n_decode=1, context_tokens=context))
    return Timing(ttft_s, tpot_s if n_more else None, ttft_s + n_more * tpot_s)


def capped_by_actual(estimate: Timing, entry: Account) -> Timing:
    """An estimate for the request alone, but no more than the time that it actually took after its
    admission. Step costs are scaled to all steps of a log; if the machine stalled in some of them,
    the costs are too high for requests served without a stall."""
    was, queue_s = timing(entry), entry.queue_s
    return Timing(
        _capped(estimate.ttft_s, was.ttft_s, queue_s),
        _capped(estimate.tpot_s, was.tpot_s),
        _capped(estimate.e2e_s, was.e2e_s, queue_s),
    )


def capacity_tokens_per_s(entries: Sequence[Account], engine: EngineCapacity) -> float | None:
    """Tokens (uncached prompt, and output) per second of the fullest batch of requests with the
    mean sizes of `entries` (at least one): as many decodes as slots and KV allow, and in each step
    as many prompt tokens as keep the batch full. None where the cost model's steps take no time.
    """
    n = len(entries)
    n_prompt = sum(entry.input_tokens - entry.cached_tokens for entry in entries) / n
    n_output = max(sum(entry.output_tokens for entry in entries) / n, 1.0)
    context = sum(entry.input_tokens for entry in entries) / n + n_output / 2
    n_rows = min(
        float(engine.max_num_seqs),
        max(engine.kv_tokens / context, 1.0),
        engine.step_tokens / (1 + n_prompt / n_output),
    )
    n_read = n_rows * n_prompt / n_output  # prompt tokens per step
    shape = StepShape(
        n_seqs=ceil(n_rows) + (n_read > 0),
        prefill_tokens=round(n_read),
        prefill_attention=n_read * n_prompt / 2,
        n_decode=ceil(n_rows),
        context_tokens=round(n_rows * context),
    )
    step_s = engine.cost.estimate(shape)
    return (n_rows + n_read) / step_s if step_s > 0 else None


def slowed_by(entry: Account, steps: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of the request's decode steps that were spent on prompts of other requests, by
    request; each step's time is split by tokens. Needs steps of level "full"."""
    if entry.ttft_s is None or entry.e2e_s is None:
        return {}
    begin_s, end_s = entry.arrived_s + entry.ttft_s, entry.arrived_s + entry.e2e_s
    slowed_s: defaultdict[str, float] = defaultdict(float)
    first = bisect_left(steps, begin_s, key=_planned_s)
    for record in steps[first : bisect_left(steps, end_s, lo=first, key=_planned_s)]:
        n_tokens = sum(n for _, n in record.items)
        for name, n in record.items:
            if n > 1 and name != entry.request_id:
                slowed_s[name] += record.duration_s * n / n_tokens
    return dict(slowed_s)


def _is_met(entry: Account, slo: SloLimit) -> bool:
    was_s = _latency_s(timing(entry), slo)
    if was_s is not None:
        return was_s <= slo.seconds
    if slo.metric == "tpot":
        return True  # fewer than two tokens have no time between them
    return entry.e2e_s is None or entry.e2e_s <= slo.seconds


def _latency_s(times: Timing, slo: SloLimit) -> float | None:
    return {"ttft": times.ttft_s, "tpot": times.tpot_s, "e2e": times.e2e_s}[slo.metric]


def _planned_s(record: StepRecord) -> float:
    return record.t_s


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _capped(estimate_s: float | None, was_s: float | None, queue_s: float = 0.0) -> float | None:
    if estimate_s is None or was_s is None:
        return estimate_s
    return min(estimate_s, max(was_s - queue_s, 0.0))
