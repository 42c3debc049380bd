"""Whose fault a missed promise is, asked in this order:

1. the request's own: even alone on the engine it would have missed (cost model);
2. the capacity's: more tokens were offered around then than the engine can do at all;
3. the policy's: the same requests replayed under another policy keep this slo, and replayed
   under the one that served them they miss it, or the replay could prove nothing;
4. interference: none of these; the top blocker by charged seconds is named.

Where replays ended before they could tell 3 from 4, whoever handed them in makes it unsettled.

Pure: the replay is handed in, whoever does it.
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
    """What a request was served with, from its arrival (s); None where it never came."""

    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None


Replay = Callable[[str], Mapping[str, Timing]]  # mode → what each request would have been served


class SloLimit(NamedTuple):
    """`ttft`, `tpot` or `e2e` (of a deadline) within `seconds`."""

    metric: str
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What an engine can do: the cost of a step, and its limits in sequences, in tokens per step
    and in tokens of KV."""

    cost: CostModel
    max_num_seqs: int
    step_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True)
class Attribution:
    """One missed promise: `was_s` is None for what never came, `because` the evidence in words,
    `culprit` the mode that keeps it (policy) or the top blocker (interference)."""

    request_id: str
    tenant: str
    slo: SloLimit
    was_s: float | None
    cause: MissCause
    evidence: str
    subject: str = ""

    def sentence(self) -> str:
        was = "never came" if self.was_s is None else f"{self.was_s:.3g} s"
        name = self.slo.metric.upper()
        return f"{name} {was}, {self.slo.seconds:.3g} s promised: {self.evidence}"

    def as_json(self) -> dict[str, object]:
        """The keys of `/debug/misses` and `--misses --json`, which are older than the fields'
        names; `promise` repeats `slo` for one release."""
        return {
            "request_id": self.request_id,
            "tenant": self.tenant,
            "slo": self.slo._asdict(),
            "promise": self.slo._asdict(),
            "was_s": self.was_s,
            "blame": str(self.cause),
            "because": self.evidence,
            "culprit": self.subject,
            "sentence": self.sentence(),
        }


class Attributor:
    """Attributes the misses of one run. `accounts` are all its requests; `replay` is asked once for
    `control`, the mode that served them ("": it is not asked), and for each of `modes`, in order,
    and only if a miss gets that far; `steps` (level "full") tell who slowed a decode down."""

    def __init__(
        self,
        accounts: Iterable[Account],
        plant: EngineCapacity,
        replay: Replay | None = None,
        modes: Sequence[str] = (),
        steps: Sequence[StepRecord] = (),
        window_s: float = _WINDOW_S,
        control: str = "",
    ) -> None:
        self._accounts = sorted(accounts, key=lambda entry: entry.arrived_s)
        self._arrivals = [entry.arrived_s for entry in self._accounts]
        self._plant, self._steps, self._window_s = plant, steps, window_s
        self._replay, self._modes = replay, tuple(modes) if replay is not None else ()
        self._control = control
        self._replayed: dict[str, Mapping[str, Timing]] = {}

    def misses(self) -> list[Attribution]:
        """Every missed promise of the run, in order of arrival."""
        return [found for entry in self._accounts for found in self.attribute(entry)]

    def attribute(self, entry: Account) -> list[Attribution]:
        """The missed promises of one request; empty when it kept all."""
        return [self._judge(entry, slo) for slo in missed_slos(entry)]

    def _judge(self, entry: Account, slo: SloLimit) -> Attribution:
        blame, because, culprit = (
            self._own_fault(entry, slo)
            or self._overload(entry)
            or self._other_policy(entry, slo)
            or self._interference(entry, slo)
        )
        return Attribution(
            entry.request_id,
            entry.tenant,
            slo,
            _of(timing(entry), slo),
            blame,
            because,
            culprit,
        )

    def _own_fault(self, entry: Account, slo: SloLimit) -> tuple[MissCause, str, str] | None:
        own_s = _of(capped_by_actual(timing_alone(entry, self._plant), entry), slo)
        if own_s is None or own_s <= slo.seconds:
            return None
        return MissCause.request, f"even alone it takes {own_s:.3g} s", ""

    def _overload(self, entry: Account) -> tuple[MissCause, str, str] | None:
        begin_s, end_s = entry.arrived_s - self._window_s, entry.arrived_s + entry.queue_s
        first, last = bisect_left(self._arrivals, begin_s), bisect_right(self._arrivals, end_s)
        near = self._accounts[first:last]
        n_tokens = sum(_asked_tokens(e) for e in near)
        begin_s = max(begin_s, near[0].arrived_s) if near else begin_s
        offered = n_tokens / max(end_s - begin_s, self._window_s)
        most = capacity_tokens_per_s(near, self._plant)
        if most is None or offered <= most:
            return None
        return (
            MissCause.capacity,
            f"{offered:.3g} tokens/s were offered, the engine does {most:.3g} at most",
            "",
        )

    def _other_policy(self, entry: Account, slo: SloLimit) -> tuple[MissCause, str, str] | None:
        if self._modes and self._control and not self._shows(entry, slo):
            return None
        for mode in self._modes:
            would_s = self._would_s(mode, entry, slo)
            if would_s is not None and would_s <= slo.seconds:
                return MissCause.policy, f"under {mode} it would have been {would_s:.3g} s", mode
        return None

    def _shows(self, entry: Account, slo: SloLimit) -> bool:
        """Whether the replay under the mode that served the request shows the miss there was."""
        if entry.request_id not in self._timings(self._control):
            return False
        again_s = self._would_s(self._control, entry, slo)
        return again_s is None or again_s > slo.seconds

    def _would_s(self, mode: str, entry: Account, slo: SloLimit) -> float | None:
        would = self._timings(mode).get(entry.request_id)
        return None if would is None else _of(would, slo)

    def _timings(self, mode: str) -> Mapping[str, Timing]:
        if mode not in self._replayed:
            assert self._replay is not None, "modes are only kept with a replay"
            self._replayed[mode] = self._replay(mode)
        return self._replayed[mode]

    def _interference(self, entry: Account, slo: SloLimit) -> tuple[MissCause, str, str]:
        blockers = defaultdict[str, float](float)
        for cause, seconds in entry.waits:
            if cause.blocker:
                blockers[cause.blocker] += seconds
        if slo.metric != "ttft":
            for name, seconds in slowed_by(entry, self._steps).items():
                blockers[name] += seconds
        culprit = max(blockers, key=lambda name: blockers[name], default="")
        if culprit:
            return (
                MissCause.interference,
                f"{blockers[culprit]:.3g} s because of {culprit}",
                culprit,
            )
        return MissCause.interference, f"it {entry.sentence()}", ""


def missed_slos(entry: Account) -> list[SloLimit]:
    """The promises that a request which is over was not served with. One that was given up before
    a promise was due missed nothing."""
    deadline_s = None if entry.deadline_s is None else entry.deadline_s - entry.arrived_s
    asked = (("ttft", entry.ttft_slo_s), ("tpot", entry.tpot_slo_s), ("e2e", deadline_s))
    promises = [SloLimit(metric, seconds) for metric, seconds in asked if seconds is not None]
    return [slo for slo in promises if not _is_kept(entry, slo)]


def timing(entry: Account) -> Timing:
    """What a request was served with."""
    is_whole = entry.state in ("finished_stop", "finished_length")
    return Timing(entry.ttft_s, entry.tpot_s, entry.e2e_s if is_whole else None)


def timing_alone(entry: Account, plant: EngineCapacity) -> Timing:
    """What an idle engine would have served the request with: its prompt in steps of its own, each
    as long as the limit lets it be, then one token a step. Without an output of two tokens there
    is no TPOT."""
    ttft_s, done = 0.0, entry.cached_tokens
    while done < entry.input_tokens:
        n = min(plant.step_tokens, entry.input_tokens - done)
        ttft_s += plant.cost.estimate(StepShape(1, n, n * (done + n / 2)))
        done += n
    n_more = max(entry.output_tokens - 1, 0)
    context = entry.input_tokens + n_more // 2
    tpot_s = plant.cost.estimate(StepShape(n_seqs=1, n_decode=1, context_tokens=context))
    return Timing(ttft_s, tpot_s if n_more else None, ttft_s + n_more * tpot_s)


def capped_by_actual(estimate: Timing, entry: Account) -> Timing:
    """An estimate for the request alone, and no more than it took in company once it was let in:
    step costs of a machine that stood still meanwhile are too high for what was served besides."""
    was, queue_s = timing(entry), entry.queue_s
    return Timing(
        _capped(estimate.ttft_s, was.ttft_s, queue_s),
        _capped(estimate.tpot_s, was.tpot_s),
        _capped(estimate.e2e_s, was.e2e_s, queue_s),
    )


def capacity_tokens_per_s(entries: Sequence[Account], plant: EngineCapacity) -> float | None:
    """Tokens (prompt, not cached, and output) per second of the fullest batch that holds requests
    of this mean size: as many decode as slots and KV admit, and each step reads as much prompt as
    keeps them coming. None where the cost model says that steps take no time.
    """
    n_prompt = _mean(entry.input_tokens - entry.cached_tokens for entry in entries)
    n_output = max(_mean(entry.output_tokens for entry in entries), 1.0)
    context = _mean(entry.input_tokens for entry in entries) + n_output / 2
    n_rows = min(
        float(plant.max_num_seqs),
        max(plant.kv_tokens / context, 1.0),
        plant.step_tokens / (1 + n_prompt / n_output),
    )
    n_read = n_rows * n_prompt / n_output  # prompt tokens per step
    shape = StepShape(
        n_seqs=ceil(n_rows) + (n_read > 0),
        prefill_tokens=round(n_read),
        prefill_attention=n_read * n_prompt / 2,
        n_decode=ceil(n_rows),
        context_tokens=round(n_rows * context),
    )
    step_s = plant.cost.estimate(shape)
    return (n_rows + n_read) / step_s if step_s > 0 else None


def slowed_by(entry: Account, steps: Sequence[StepRecord]) -> dict[str, float]:
    """Seconds of the steps a request decoded in that went into others' prompts, by request: each
    step's time is split by tokens. Needs steps of level "full"."""
    if entry.ttft_s is None or entry.e2e_s is None:
        return {}
    begin_s, end_s = entry.arrived_s + entry.ttft_s, entry.arrived_s + entry.e2e_s
    charged: defaultdict[str, float] = defaultdict(float)
    first = bisect_left(steps, begin_s, key=_planned_s)
    for record in steps[first : bisect_left(steps, end_s, lo=first, key=_planned_s)]:
        n_tokens = sum(n for _, n in record.items)
        for name, n in record.items:
            if n > 1 and name != entry.request_id:
                charged[name] += record.duration_s * n / n_tokens
    return dict(charged)


def _is_kept(entry: Account, slo: SloLimit) -> bool:
    was_s = _of(timing(entry), slo)
    if was_s is not None:
        return was_s <= slo.seconds
    if slo.metric == "tpot":
        return True  # fewer than two tokens: there is no time between them
    return entry.e2e_s is None or entry.e2e_s <= slo.seconds


def _of(times: Timing, slo: SloLimit) -> float | None:
    return {"ttft": times.ttft_s, "tpot": times.tpot_s, "e2e": times.e2e_s}[slo.metric]


def _planned_s(record: StepRecord) -> float:
    return record.t_s


def _asked_tokens(entry: Account) -> int:
    return entry.input_tokens - entry.cached_tokens + entry.output_tokens


def _capped(said_s: float | None, was_s: float | None, queue_s: float = 0.0) -> float | None:
    return said_s if said_s is None or was_s is None else min(said_s, max(was_s - queue_s, 0.0))


def _mean(values: Iterable[float]) -> float:
    kept = list(values)
    return sum(kept) / len(kept) if kept else 0.0
