"""The step core in C, as Python calls it: arrays of requests in, arrays of instants out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.system.c_programs import CProgram
from reference_engine.state.cost_model import StepCost, StepShape
from reference_engine.state.plan import Why
from reference_engine.state.step_variation import VaryingSteps

PROGRAM = CProgram(
    Path(__file__).parent,
    "step-core",
    "the compiled simulator",
    (
        *("-std=c11", "-D_GNU_SOURCE", "-O2", "-ffp-contract=off", "-fPIC", "-shared"),
        *("-Wall", "-Wextra"),
    ),
)
WHYS = (
    *(Why.step_in_flight, Why.no_token_budget, Why.no_seq_slot, Why.no_kv_blocks),
    *(Why.behind, Why.preempted_by, Why.window_open, Why.static_group_running),
)
"""The causes of waiting, in the order of the columns of `Traffic.waits`."""
_DRAWN_STEPS = 4096

Floats = NDArray[np.float64]
Shorts = NDArray[np.int32]
Integers = NDArray[Any]


class Planning(IntEnum):
    """The rule by which a step is planned. `whole_prompts`: no prompt is split to fit a budget."""

    chunked = 0
    whole_prompts = 1
    prefill_first = 2
    fixed_batch = 3


class Reserved(IntEnum):
    """The KV room that an admission takes: of its step, of its prompt, of its longest answer."""

    step = 0
    prompt = 1
    longest = 2


class Load(IntEnum):
    """The load that the router compares, or the replica that it selects without."""

    first = 0
    requests = 1
    kv = 2
    in_turn = 3
    random = 4


class Outcome(IntEnum):
    """How a request ended."""

    not_released = 0
    in_flight = 1
    length = 2
    stop = 3
    refused = 4
    timed_out = 5
    cancelled = 6
    dropped = 7


class Status(IntEnum):
    """Why the core has returned."""

    done = 0
    paused = 1
    draw = 2
    pick = 3
    steps = 4
    check = 5
    stuck = 6
    no_memory = 7
    unmeasured = 8
    client_acts = 9
    receive = 10
    refused = 11


_KINDS = ("prompt", "decode", "mixed")
_BOUNDS = ("prompts", "prompt_tokens", "prompt_attention", "decodes", "context_tokens")


class _MeasuredSteps(Structure):
    _fields_ = (("is_measured", c_int64), ("bounds", c_double * 2 * len(_BOUNDS)))


class _Shape(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("n_seqs", "prefill_tokens", "n_decode", "context_tokens")),
        ("prefill_attention", c_double),
        *((name, c_int64) for name in ("padding_tokens", "padding_rows", "padding_context_tokens")),
    )


class _Cost(Structure):
    _fields_ = (
        *((name, c_double) for name in ("step_s", "seq_s", "added_token_s", "weights_s")),
        *((name, c_double) for name in ("token_s", "head_s", "context_token_s")),
        *((name, c_double) for name in ("prefill_attention_s", "reduce_saved_s")),
        *((name, c_double) for name in ("reduce_saved_token_s", "prefill_seq_s", "row_s")),
        *((name, c_double) for name in ("sharpness", "fused_attention")),
        ("graph_rows", c_void_p),
        ("n_graph_rows", c_int64),
        ("piece_seqs", c_void_p),
        ("piece_s", c_void_p),
        ("n_pieces", c_int64),
        ("is_fitted", c_int64),
        ("measured", _MeasuredSteps * len(_KINDS)),
    )


class _Settings(Structure):
    _fields_ = (
        ("cost", _Cost),
        *((name, c_double) for name in ("delay_share", "delay_s", "watermark")),
        *((name, c_int64) for name in ("varies", "mode", "token_budget", "max_num_seqs")),
        *((name, c_int64) for name in ("long_prefill_tokens", "reserve", "pads_to_budget")),
        *((name, c_int64) for name in ("most_seqs", "most_step_tokens", "most_model_len")),
        *((name, c_int64) for name in ("n_blocks", "block_tokens", "prefix_cache")),
        ("window_s", c_double),
        *((name, c_int64) for name in ("masks_ended", "pads_to_longest", "answers_at_end")),
        *((name, c_void_p) for name in ("preferred_sizes", "padded_sizes")),
        *((name, c_int64) for name in ("n_preferred_sizes", "n_padded_sizes")),
    )


class _Traffic(Structure):
    _fields_ = (
        ("n", c_int64),
        *((name, c_void_p) for name in ("arrived_s", "n_prompt", "n_output", "max_tokens")),
        *((name, c_void_p) for name in ("account", "first_time")),
        *((name, c_void_p) for name in ("tenant", "prefix_id", "prefix_tokens")),
        *((name, c_void_p) for name in ("piece_after", "piece_start")),
        *((name, c_int64) for name in ("first_piece", "n_pieces")),
        *((name, c_int64) for name in ("max_in_flight", "n_accounts")),
        *((name, c_double) for name in ("timeout_s", "end_s")),
        *((name, c_void_p) for name in ("scheduled_s", "first_token_s", "done_s", "times_s")),
        *((name, c_void_p) for name in ("n_received", "n_preempted", "n_cached", "served_by")),
        *((name, c_void_p) for name in ("outcome", "ended", "waits")),
    )


class _Router(Structure):
    _fields_ = (("kind", c_int64), ("n_choices", c_int64), ("stale_s", c_double))


class _Totals(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("n_received", "n_steps", "n_preemptions", "n_padding")),
        *((name, c_int64) for name in ("n_sampled", "n_cached")),
        *((name, c_double) for name in ("request_s", "busy_s")),
    )


@dataclass(frozen=True)
class Batching:
    """A fixed batch (`policies.fixed_batch`): the window (s) before it, and its padding."""

    window_s: float
    masks_ended: bool
    pads_to_longest: bool
    answers_at_end: bool
    preferred_sizes: tuple[int, ...] = ()
    padded_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineSettings:
    """An engine: its costs, its limits, and the mode as a rule and numbers. `steps` are the times
    of its steps around their costs (None: its costs); `delay_share` and `delay_s` lengthen every
    step."""

    cost: StepCost
    planning: Planning
    token_budget: int
    max_num_seqs: int
    n_blocks: int
    block_tokens: int
    most_seqs: int
    most_step_tokens: int
    most_model_len: int
    prefix_cache: bool = False
    watermark: float = 0.0
    long_prefill_tokens: int = 0
    reserved: Reserved = Reserved.step
    pads_to_budget: bool = False
    delay_share: float = 0.0
    delay_s: float = 0.0
    steps: VaryingSteps | None = None
    batch: Batching | None = None


@dataclass(frozen=True)
class RouterSettings:
    """A router: `n_choices` replicas are drawn (0: all), and the one with the least load receives
    the request. The loads are up to `stale_s` old."""

    load: Load = Load.first
    n_choices: int = 0
    stale_s: float = 0.0


class SharedTexts:
    """The texts with which the prompts of `Traffic` begin, by request: `prefix_tokens` tokens of
    the text `prefix_id`, or of the pieces up to it, among the requests of a `tenant`. Text number
    `first_piece + k` is piece k, of `tokens[k]` tokens behind the text `after[k]` (0: none)."""

    def __init__(
        self,
        tenant: Integers,
        prefix_id: Integers,
        prefix_tokens: Integers,
        *,
        first_piece: int = 0,
        after: Integers | Sequence[int] = (),
        tokens: Integers | Sequence[int] = (),
    ) -> None:
        self.tenant, self.prefix_id, self.prefix_tokens, self.piece_after = (
            np.ascontiguousarray(column, np.uint32)
            for column in (tenant, prefix_id, prefix_tokens, after)
        )
        self.first_piece, self.n_pieces = first_piece, len(self.piece_after)
        self.piece_start = starts = np.zeros(self.n_pieces, np.int64)
        for piece, before in enumerate((self.piece_after.astype(np.int64) - first_piece).tolist()):
            if self.piece_after[piece]:
                starts[piece] = starts[before] + tokens[before]


class Traffic:
    """Requests in the order of their arrivals (s), their lengths (tokens), and their results.

    A request ends `timeout_s` after its arrival, and all end at `end_s`. At `max_in_flight`
    requests in flight an arrival is dropped. `account` is the row of `waits` for the request, -1:
    none.

    Results by request, NaN or 0 where it did not come to that: `scheduled_s`, `first_token_s`,
    `done_s`, `n_received` (tokens), `n_preempted`, `n_cached` (tokens of the prompt), `served_by`
    (number of the replica) and `outcome`. `ended` are the requests in the order of their ends.
    `waits` are ticks of 2^-40 s by account and cause [n_accounts, len(WHYS)]. With `has_times`,
    `times_s` holds the instants of all tokens, those of request k from index `first_time[k]` on.
    """

    def __init__(
        self,
        arrived_s: Floats,
        n_prompt: Shorts,
        n_output: Shorts,
        max_tokens: Shorts,
        *,
        account: Shorts | None = None,
        timeout_s: float = np.inf,
        end_s: float = np.inf,
        max_in_flight: int = 1 << 62,
        has_times: bool = True,
        texts: SharedTexts | None = None,
    ) -> None:
        n = len(arrived_s)
        assert not n or np.all(np.diff(arrived_s) >= 0), "requests in the order of arrival"
        self.arrived_s = np.ascontiguousarray(arrived_s, np.float64)
        self.n_prompt = np.ascontiguousarray(n_prompt, np.int32)
        self.n_output = np.ascontiguousarray(n_output, np.int32)
        self.max_tokens = np.ascontiguousarray(max_tokens, np.int32)
        accounts = np.full(n, -1) if account is None else account
        self.account = np.ascontiguousarray(accounts, np.int32)
        most_tokens = np.minimum(self.n_output, self.max_tokens)
        self.first_time = np.r_[0, np.cumsum(most_tokens, dtype=np.int64)]
        self.timeout_s, self.end_s = timeout_s, end_s
        self.max_in_flight = max_in_flight
        self.scheduled_s, self.first_token_s, self.done_s = (np.full(n, np.nan) for _ in range(3))
        self.times_s = np.empty(int(self.first_time[-1])) if has_times else None
        self.n_received, self.n_preempted = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.n_cached, self.served_by = np.zeros(n, np.int32), np.zeros(n, np.int32)
        self.outcome = np.zeros(n, np.int8)
        self.texts = texts
        self.ended = np.zeros(n, np.int64)
        self.waits = np.zeros((int(self.account.max(initial=-1)) + 1, len(WHYS)), np.int64)

    def __len__(self) -> int:
        return len(self.arrived_s)

    def struct(self) -> _Traffic:
        """As the core reads it; this object must outlive it."""
        texts = self.texts
        columns = vars(self) | ({} if texts is None else vars(texts))
        arrays = {
            name: value.ctypes.data
            for name, value in columns.items()
            if isinstance(value, np.ndarray)
        }
        return _Traffic(
            n=len(self),
            first_piece=0 if texts is None else texts.first_piece,
            n_pieces=0 if texts is None else texts.n_pieces,
            max_in_flight=self.max_in_flight,
            n_accounts=len(self.waits),
            timeout_s=self.timeout_s,
            end_s=self.end_s,
            **arrays,
        )


@dataclass(frozen=True)
class ReplicaTotals:
    """The totals of a replica: requests that it received, its steps, and so on; `request_s` is the
    time (s) that requests were present, summed, `busy_s` that of its steps."""

    n_received: int
    n_steps: int
    n_preemptions: int
    n_padding: int
    n_sampled: int
    n_cached: int
    request_s: float
    busy_s: float


class StepCore:
    """A simulation by the library at `path`. `rng` are the random numbers of the router."""

    def __init__(
        self,
        path: Path,
        traffic: Traffic,
        engines: Sequence[EngineSettings],
        router: RouterSettings,
        rng: np.random.Generator,
    ) -> None:
        self._library, self._rng, self._engines = _library(path), rng, engines
        self._traffic, self._struct = traffic, traffic.struct()
        self._kept: list[Any] = []  # arrays that the core reads
        self._rows = np.zeros(len(traffic), np.int64)
        self._steps: dict[int, tuple[Floats, Floats]] = {}
        self._settings = (_Settings * len(engines))(*map(self._struct_of, engines))
        self._router = _Router(router.load, router.n_choices, router.stale_s)
        self._core: int | None = self._library.simulation_new(
            byref(self._struct), self._settings, len(engines), byref(self._router)
        )
        if self._core is None:
            raise MemoryError("no memory for a simulation")

    def close(self) -> None:
        if self._core is not None:
            self._library.simulation_free(self._core)
        self._core = None

    def run(self, n_steps: int) -> Status:
        """Run for about so many steps of engines or instants of the client. `done`, `paused`,
        `check`, or the reason why the core cannot continue. Raises NotMeasured for a step outside
        the sizes for which its costs hold."""
        while True:
            status = Status(self._library.simulation_run(self._core, n_steps))
            if status is Status.steps:
                self._vary(self._lacking)
            elif status is Status.unmeasured:
                self._refuse(self._engines[self._lacking].cost)
            elif not self._is_drawn(status):
                return status

    def check_at(self, check_s: float) -> None:
        """Return `Status.check` when the client acts at `check_s` or next after it."""
        self._library.simulation_check_at(self._core, check_s)

    def stop(self, drain_s: float) -> None:
        """Release nothing more; requests in flight have `drain_s` to end."""
        self._library.simulation_stop(self._core, drain_s)

    def acted(self, next_s: float, quiet_s: float, is_closed: bool) -> None:
        """The client outside has acted. It acts again at `next_s` (infinity: never by itself), and
        acting has no effect before `quiet_s`; `is_closed`: it submits nothing more. From the first
        call on, `run` also returns `client_acts` and `receive`."""
        self._library.simulation_acted(self._core, next_s, quiet_s, is_closed)

    def submit(self, row: int, texts: Sequence[int]) -> bool:
        """Submit a row whose columns of `Traffic` are filled in; whether it is accepted so far.
        `texts` are the first block and the number of each text of the prompt, one after another."""
        array = (c_int64 * len(texts))(*texts)
        while True:
            n_texts = len(texts) // 2
            status = Status(self._library.simulation_submit(self._core, row, array, n_texts))
            if not self._is_drawn(status):
                _check_memory(status)
                return status is Status.done

    def cancel(self, row: int) -> None:
        """Cancel a row, if it has not ended."""
        _check_memory(Status(self._library.simulation_cancel(self._core, row)))

    def n_tokens(self, row: int) -> int:
        """The tokens of a row so far, of which `Traffic.times_s` has the instants."""
        return int(self._library.simulation_n_tokens(self._core, row))

    def delivered(self) -> tuple[list[int], list[int]]:
        """The rows that ended with a step to `receive`, and those that were refused at its end."""
        rows, counts = self._rows, (c_int64 * 2)()
        self._library.simulation_delivered(self._core, rows.ctypes.data, counts)
        n_ended, n_refused = counts
        return rows[:n_ended].tolist(), rows[n_ended : n_ended + n_refused].tolist()

    @property
    def now_s(self) -> float:
        return float(self._library.simulation_now_s(self._core))

    @property
    def n_released(self) -> int:
        return int(self._library.simulation_n_released(self._core))

    @property
    def n_in_flight(self) -> int:
        return int(self._library.simulation_n_in_flight(self._core))

    @property
    def n_ended(self) -> int:
        return int(self._library.simulation_n_ended(self._core))

    def totals(self) -> Iterator[ReplicaTotals]:
        """The totals of each replica, as of now."""
        for number in range(len(self._engines)):
            totals = _Totals()
            self._library.simulation_totals(self._core, number, byref(totals))
            yield ReplicaTotals(*(getattr(totals, field[0]) for field in _Totals._fields_))

    @property
    def _lacking(self) -> int:
        return int(self._library.simulation_lacking(self._core))

    def _is_drawn(self, status: Status) -> bool:
        """Whether the router lacked random numbers, which it has now."""
        if status is Status.pick:
            self._answer([int(self._rng.integers(self._lacking))])
        elif status is Status.draw:
            n = len(self._engines)
            self._answer(self._rng.choice(n, self._lacking, replace=False).tolist())
        else:
            return False
        return True

    def _answer(self, numbers: Sequence[int]) -> None:
        self._library.simulation_answer(self._core, (c_int64 * len(numbers))(*numbers))

    def _vary(self, number: int) -> None:
        steps = self._engines[number].steps
        assert steps is not None, f"the steps of replica {number} do not vary"
        ratios, pauses_s = self._steps[number] = steps.take(_DRAWN_STEPS)
        self._library.simulation_vary(
            self._core, number, ratios.ctypes.data, pauses_s.ctypes.data, _DRAWN_STEPS
        )

    def _refuse(self, cost: StepCost) -> None:
        """Raises NotMeasured."""
        shape = _Shape()
        self._library.simulation_shape(self._core, byref(shape))
        names = (field[0] for field in _Shape._fields_)
        counts = {name: getattr(shape, name) for name in names if name in StepShape._fields}
        cost.check_measured(StepShape(**counts))

    def _struct_of(self, engine: EngineSettings) -> _Settings:
        cost, pieces = engine.cost, engine.cost.seq_pieces
        rows = np.array(cost.graph_rows, np.int64)
        seqs = np.array([n for n, _ in pieces], np.int64)
        seconds = np.array([piece_s for _, piece_s in pieces], np.float64)
        batch = engine.batch or Batching(0.0, False, False, False)
        preferred = np.array(sorted(batch.preferred_sizes), np.int64)
        padded = np.array(sorted(batch.padded_sizes), np.int64)
        self._kept += (rows, seqs, seconds, preferred, padded)
        linear = {
            field[0]: getattr(cost, field[0]) for field in _Cost._fields_ if field[1] is c_double
        }
        return _Settings(
            cost=_Cost(
                **linear,
                graph_rows=rows.ctypes.data,
                n_graph_rows=len(rows),
                piece_seqs=seqs.ctypes.data,
                piece_s=seconds.ctypes.data,
                n_pieces=len(pieces),
                is_fitted=bool(cost.measured),
                measured=_measured(cost),
            ),
            delay_share=engine.delay_share,
            delay_s=engine.delay_s,
            watermark=engine.watermark,
            varies=engine.steps is not None,
            mode=engine.planning,
            token_budget=engine.token_budget,
            max_num_seqs=engine.max_num_seqs,
            long_prefill_tokens=engine.long_prefill_tokens,
            reserve=engine.reserved,
            pads_to_budget=engine.pads_to_budget,
            most_seqs=engine.most_seqs,
            most_step_tokens=engine.most_step_tokens,
            most_model_len=engine.most_model_len,
            n_blocks=engine.n_blocks,
            block_tokens=engine.block_tokens,
            prefix_cache=engine.prefix_cache,
            window_s=batch.window_s,
            masks_ended=batch.masks_ended,
            pads_to_longest=batch.pads_to_longest,
            answers_at_end=batch.answers_at_end,
            preferred_sizes=preferred.ctypes.data,
            padded_sizes=padded.ctypes.data,
            n_preferred_sizes=len(preferred),
            n_padded_sizes=len(padded),
        )


def _measured(cost: StepCost) -> Any:
    by_kind = (_MeasuredSteps * len(_KINDS))()
    for steps in reversed(cost.measured):  # the first of a kind counts
        bounds = [getattr(steps, name) for name in _BOUNDS]
        by_kind[_KINDS.index(steps.kind)] = _MeasuredSteps(True, tuple(map(tuple, bounds)))
    return by_kind


def _check_memory(status: Status) -> None:
    if status is Status.no_memory:
        raise MemoryError("no memory for a simulation")


@contextmanager
def step_core(
    path: Path,
    traffic: Traffic,
    engines: Sequence[EngineSettings],
    router: RouterSettings,
    rng: np.random.Generator,
) -> Iterator[StepCore]:
    """A simulation, whose memory is given back at the end of the block."""
    core = StepCore(path, traffic, engines, router, rng)
    try:
        yield core
    finally:
        core.close()


@cache
def _library(path: Path) -> ctypes.CDLL:
    """The library at `path`, with the types of its functions."""
    library, core = ctypes.CDLL(str(path)), c_void_p
    results = {
        "new": c_void_p,
        "free": None,
        "run": c_int64,
        "lacking": c_int64,
        "answer": None,
        "vary": None,
        "check_at": None,
        "stop": None,
        "now_s": c_double,
        "n_released": c_int64,
        "n_in_flight": c_int64,
        "n_ended": c_int64,
        "totals": None,
        "acted": None,
        "submit": c_int64,
        "cancel": c_int64,
        "n_tokens": c_int64,
        "delivered": None,
        "shape": None,
        "sizes": None,
    }
    arguments: dict[str, tuple[Any, ...]] = {
        "new": (POINTER(_Traffic), POINTER(_Settings), c_int64, POINTER(_Router)),
        "run": (core, c_int64),
        "answer": (core, POINTER(c_int64)),
        "vary": (core, c_int64, c_void_p, c_void_p, c_int64),
        "check_at": (core, c_double),
        "stop": (core, c_double),
        "totals": (core, c_int64, POINTER(_Totals)),
        "acted": (core, c_double, c_double, c_int64),
        "submit": (core, c_int64, POINTER(c_int64), c_int64),
        "cancel": (core, c_int64),
        "n_tokens": (core, c_int64),
        "delivered": (core, c_void_p, POINTER(c_int64)),
        "shape": (core, POINTER(_Shape)),
        "sizes": (POINTER(c_int64),),
    }
    for name, result in results.items():
        function = getattr(library, f"simulation_{name}")
        function.restype, function.argtypes = result, arguments.get(name, (core,))
    structs = (_Traffic, _Settings, _Router, _Totals, _Shape)
    sizes = (c_int64 * len(structs))()
    library.simulation_sizes(sizes)
    declared = [ctypes.sizeof(kind) for kind in structs]
    assert list(sizes) == declared, f"the core has structures of {list(sizes)} bytes: {declared}"
    return library
