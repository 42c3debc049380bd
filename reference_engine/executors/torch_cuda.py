"""Batches on a GPU: decode steps as CUDA graphs with logits and sampling inside, anything else step
by step, tokens copied back by event.

With `on=cpu` the same code runs without a GPU, its graphs called as functions: for tests.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from loadgen.errors import MissingDependency, UsageError
from reference_engine.executors.base import Caps, Executor, ExecutorKind, Site
from reference_engine.executors.cuda_stream import CpuLane, CudaLane, Lane
from reference_engine.executors.torch_memory import (
    Arena,
    Held,
    HostKv,
    aligned,
    asked_for,
    blocks_that_fit,
)
from reference_engine.executors.torch_sampling import (
    AsksOnDevice,
    Draws,
    SamplingRequests,
    asks_of,
    choose,
)
from reference_engine.executors.torch_step import (
    DECODE_FIELDS,
    Seats,
    decode_numbers,
    decode_step,
    mixed,
)
from reference_engine.kernels.ops import Kernels, Ops, ops
from reference_engine.kernels.tiles import splits_for
from reference_engine.model.filler import filler_start
from reference_engine.model.paged import PagedLlama
from reference_engine.model.weights import load
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.cost_model import Padding
from reference_engine.state.model_config import KvDtype, ModelConfig
from reference_engine.state.sequence import Request, Sampling

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COPY_BYTES_PER_S = 40e9  # PCIe 5 ×16 in practice; assumed, decides between swap and recompute
_HOST_KV_BYTES = 256 << 20  # with on=cpu: memory is taken when it is written to, not before
_RESERVE_BYTES = 2 << 30  # graphs, library workspaces, fragmentation

Tokens = Callable[[], StepResult]


class TorchCudaExecutor(ExecutorKind):
    """`seed` of the random weights (unused with a directory); `dtype` of weights and KV, and
    `kv_dtype` of KV alone, in 8 bits; `memory_share` of the GPU that weights, steps and KV may
    take; `graphs` for decode steps; `fused_attention` of decodes and prompts in one launch;
    `kernels` of Triton, or their plain twins; `on` which device.
    """

    kind: ClassVar[str] = "torch_cuda"
    sizes_itself: ClassVar[bool] = True

    seed: int = Field(default=0, ge=0)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    kv_dtype: KvDtype = "auto"
    memory_share: float = Field(default=0.9, gt=0, le=0.98)
    graphs: bool = True
    fused_attention: bool = False
    kernels: Kernels = "triton"
    on: str = Field(default="cuda", pattern=r"^(cuda(:\d+)?|cpu)$")

    def build(self, site: Site) -> Executor:
        _refuse_odd_shape(site.model.config)
        lane = _lane(self.on)
        chosen = ops(self.kernels)
        began_s = time.monotonic()
        weights = load(site.model, self.seed, lane.device, _DTYPES[self.dtype])
        config = site.model.config
        model = PagedLlama(
            config,
            weights,
            chosen,
            site.block_tokens,
            site.max_model_len,
            self.kv_dtype,
            self.fused_attention,
        )
        n_blocks = site.n_blocks or _measured_blocks(model, chosen, site, lane, self.memory_share)
        built = TorchCuda(model, chosen, site, n_blocks, lane, self.graphs)
        took_s = time.monotonic() - began_s
        log.info(
            "%s on %s: %d KV blocks of %d bytes, %.1f s",
            *(site.model.name, self.on, n_blocks, model.block_bytes, took_s),
        )
        return built


class TorchCuda:
    """The runner. One step at a time: `launch`, then its tokens."""

    def __init__(
        self,
        model: PagedLlama,
        chosen: Ops,
        site: Site,
        n_blocks: int,
        lane: Lane,
        has_graphs: bool = True,
    ) -> None:
        self._model, self._ops, self._lane = model, chosen, lane
        self._most = site.max_model_len
        with asked_for("kv_blocks", n_blocks, model.block_bytes, RuntimeError):
            # One block more than the engine knows of: where padding is written.
            model.cache = model.memory(n_blocks + 1)
        with asked_for("swap_blocks", site.n_host_blocks, model.block_bytes, RuntimeError):
            self._host = HostKv(model.cache, site.n_host_blocks, lane.is_pinning)
        copy_s = model.block_bytes / _COPY_BYTES_PER_S
        self.caps = Caps(site.n_host_blocks, copy_s, n_blocks, lane.gpu)
        config = model.config
        self._group = config.n_heads // config.n_kv_heads
        self._seats = Seats.of(site.max_num_seqs, site.max_model_len, site.block_tokens, n_blocks)
        tables = torch.from_numpy(self._seats.tables.array)
        self._device_tables = tables.to(lane.device).clone()
        self._sizes = buckets(site.max_num_seqs)
        self._logits = torch.empty(site.max_num_seqs, config.vocab_size, device=lane.device)
        self._tokens = torch.zeros(site.max_num_seqs, dtype=torch.int64, pin_memory=lane.is_pinning)
        self._logprobs = torch.zeros(site.max_num_seqs, pin_memory=lane.is_pinning)
        self._is_under_way = False
        self._decode_arena = Arena(
            aligned(DECODE_FIELDS * site.max_num_seqs), lane.device, lane.is_pinning
        )
        self._mixed_arena = Arena(1 << 16, lane.device, lane.is_pinning)
        self._change_arena = Arena(1 << 12, lane.device, lane.is_pinning)
        self._ask_arena = Arena(1 << 12, lane.device, lane.is_pinning)
        self._graphs: dict[int, tuple[Held, Callable[[], None], torch.Tensor]] = {}
        if has_graphs:
            self._capture()

    def execute(self, batch: StepBatch) -> StepResult:
        return self.launch(batch)()

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Tokens:
        """Begin a step; the returned function waits for its tokens."""
        assert not self._is_under_way, "the step before was not waited for"
        self._lane.enter()
        if batch.copies:
            self._host.work_off(batch.copies, self._model.cache)
        rows, padding = batch.rows, batch.padding
        n_decode = len(batch.decodes) + padding.decode_rows
        bucket = bucket_of(n_decode, self._sizes)
        if n_decode and not rows and not padding.prefill_tokens and bucket in self._graphs:
            return self._replay(batch.decodes, padding, bucket)
        if n_decode or rows or padding.prefill_tokens:
            return self._compute(batch)
        return self._answer(torch.empty(0), []) if batch.copies else StepResult

    # --- decode steps

    def _replay(self, decodes: Sequence[Request], padding: Padding, bucket: int) -> Tokens:
        held, again, tokens = self._graphs[bucket]
        start = filler_start(padding, self._most)
        asking = decode_numbers(held.numbers, decodes, padding.decode_rows, start, self._seats)
        self._update_tables()
        held.send()
        places = range(len(decodes))
        asked = self._asked(places, decodes, asking)
        again()
        draws = None if asked is None else Draws.of(*held.on_device[5:])
        return self._answer(tokens, places, asked, draws)

    @torch.inference_mode()
    def _capture(self) -> None:
        """A graph per bucket, the largest first, so that the smaller ones find their memory in its
        pool."""
        for bucket in reversed(self._sizes):
            held = self._decode_arena.held((DECODE_FIELDS, bucket))
            decode_numbers(held.numbers, [], 0, 0, self._seats)
            held.send()
            again, tokens = self._lane.capture(partial(self._decode, held.on_device))
            self._graphs[bucket] = held, again, tokens

    def _decode(self, numbers: torch.Tensor) -> torch.Tensor:
        step, draws = decode_step(numbers, self._device_tables, self._n_splits(numbers.shape[1]))
        logits = self._model.forward(step, self._logits)
        return self._ops.sample(logits, draws.temperatures, draws.keys)

    # --- any step

    def _compute(self, batch: StepBatch) -> Tokens:
        made = mixed(batch, self._seats, self._group, self._most)
        self._update_tables()
        self._mixed_arena = self._mixed_arena.emptied(made.size(aligned(1)))
        step, draws = made.put(
            self._mixed_arena, self._device_tables, self._n_splits(made.reads.shape[1])
        )
        asked = self._asked(made.places, made.requests, made.asking)
        logits = self._model.forward(step, self._logits)
        if not made.places:
            return self._answer(torch.empty(0), [])
        tokens = self._ops.sample(logits, draws.temperatures, draws.keys)
        return self._answer(tokens, made.places, asked, draws)

    # --- both

    def _asked(
        self, places: Sequence[int], requests: Sequence[Request], asking: Sequence[int]
    ) -> tuple[SamplingRequests, AsksOnDevice] | None:
        """Sent ahead of the step, so that nothing is sent while it runs. Now and not when tokens
        come: by then a request may have been booked one more, and ask for something else."""
        if not asking:
            return None
        asks = asks_of(places, requests, asking, self._model.config.vocab_size)
        self._ask_arena = self._ask_arena.emptied(asks.size)
        return asks, asks.put(self._ask_arena)

    def _answer(
        self,
        tokens: torch.Tensor,
        places: Sequence[int],
        asked: tuple[SamplingRequests, AsksOnDevice] | None = None,
        draws: Draws | None = None,
    ) -> Tokens:
        """Send for the tokens; `places[i]` is where the i-th answer is. `draws` are those of the
        step where anything is `asked`."""
        logprobs: torch.Tensor | None = None
        if asked is not None:
            assert draws is not None, "asked without draws"
            on_device = asked[1]
            chosen, logprobs = choose(self._logits, draws, on_device, self._ops.sample)
            tokens.index_copy_(0, on_device.rows, chosen)
            if logprobs is not None:
                self._logprobs[: len(logprobs)].copy_(logprobs, non_blocking=True)
        n = len(tokens)
        self._tokens[:n].copy_(tokens, non_blocking=True)
        done = self._lane.mark()
        self._is_under_way = True

        def wait() -> StepResult:
            done()
            self._is_under_way = False
            found: list[int] = self._tokens[:n].tolist()
            answers = [found[place] for place in places]
            if asked is None or logprobs is None:
                return StepResult(answers)
            told = self._logprobs[: len(logprobs)].tolist()
            return StepResult(answers, asked[0].told(told, len(answers)))

        return wait

    def _update_tables(self) -> None:
        at, values = self._seats.tables.changes()
        if len(at):
            size = 2 * aligned(len(at))
            self._change_arena = self._change_arena.emptied(size)
            where = self._change_arena.put(at.astype(np.int32))
            what = self._change_arena.put(values)
            self._change_arena.send()
            self._device_tables.view(-1).index_copy_(0, where.long(), what)

    def _n_splits(self, n_rows: int) -> int:
        return splits_for(max(n_rows, 1), self._model.config.n_kv_heads, self._lane.n_processors)


def _lane(on: str) -> Lane:
    if on == "cpu":
        torch.set_num_threads(1)
        return CpuLane()
    if not torch.cuda.is_available():
        raise MissingDependency(
            f"device: 'cuda' needs an NVIDIA GPU and a CUDA build of torch; torch "
            f"{torch.__version__} finds none here (device=cpu runs the same models)"
        )
    n, device = torch.cuda.device_count(), torch.device(on)
    if (device.index or 0) >= n:
        raise UsageError(f"on: there is no '{on}'; this machine has cuda:0 to cuda:{n - 1}")
    return CudaLane(torch.device("cuda", device.index or 0))


def _refuse_odd_shape(config: ModelConfig) -> None:
    dim = config.head_dim
    if dim < 16 or dim & (dim - 1):
        raise UsageError(
            f"shape: heads of {dim} numbers; the kernels compute powers of two from 16 on "
            "(device=cpu computes any)"
        )


def _demanding() -> Request:
    """At its first token, and asking for all that takes memory to choose the next one: a sort and
    sums in float64 of every logit."""
    how = Sampling(temperature=1.0, top_p=0.9, top_k=50, logprobs=True)
    return Request(
        "trial", [0], 1, 0.0, min_tokens=1, stop_ids=frozenset({0}), sampling=how, blocks=[0]
    )


@torch.inference_mode()
def _measured_blocks(model: PagedLlama, chosen: Ops, site: Site, lane: Lane, share: float) -> int:
    """KV blocks that fit beside the weights and the largest step there may be, which is computed
    once to see."""

    def largest_step() -> None:
        trial = TorchCuda(model, chosen, site, 1, lane, has_graphs=False)
        decodes = [_demanding() for _ in range(site.max_num_seqs)]
        padding = Padding(max(1, site.max_step_tokens - site.max_num_seqs), 0, 0)
        trial.execute(StepBatch(decodes=decodes, padding=padding))
        model.cache = model.memory(0)

    room = lane.room(largest_step)
    if room is None:
        return max(_HOST_KV_BYTES // model.block_bytes, -(-site.max_model_len // site.block_tokens))
    used_bytes = room.peak + room.others
    return blocks_that_fit(room.total, used_bytes, share, _RESERVE_BYTES, model.block_bytes)


def buckets(max_rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then multiples of 16 up to 256, then of 64; the last one is `max_rows`.

    A step is rounded up to the next one: rows for nobody that cost at most what the tile of a
    matrix multiplication would have cost anyway.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_rows + 64, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def bucket_of(n_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `n_rows`; None when none does."""
    at = bisect_left(sizes, n_rows)
    return sizes[at] if at < len(sizes) else None
