"""Batches on a GPU: decode steps as CUDA graphs that include logits and sampling, other steps
launched kernel by kernel, tokens copied back behind an event.

With `on=cpu` the same code runs without a GPU, its graphs called as functions: for tests.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field

from loadgen.errors import MissingDependency, UsageError
from reference_engine.executors.base import Caps, Executor, ExecutorKind, Site
from reference_engine.executors.cuda_stream import CpuStream, CudaStream, DeviceStream
from reference_engine.executors.torch_memory import (
    SIDES,
    Arena,
    HostKv,
    aligned,
    allocating,
    blocks_that_fit,
)
from reference_engine.executors.torch_sampling import (
    Draws,
    SpecialOnDevice,
    SpecialSampling,
    choose_special,
    special_sampling,
)
from reference_engine.executors.torch_step import (
    DecodeInputs,
    RequestRows,
    mixed_inputs,
)
from reference_engine.kernels.ops import Kernels, Ops, ops
from reference_engine.kernels.tiles import (
    DEFAULT_TUNING,
    KeptWork,
    Tuning,
    n_decode_programs,
    tuning_of,
)
from reference_engine.model.filler import filler_start
from reference_engine.model.paged import PagedLlama
from reference_engine.model.sampling import TopTokens
from reference_engine.model.weights import Weights, load
from reference_engine.state.batch import StepBatch, StepResult
from reference_engine.state.cost_model import Padding
from reference_engine.state.model_config import KvDtype, ModelConfig, ModelSource
from reference_engine.state.sequence import MOST_TOP_LOGPROBS, Request, Sampling

log = logging.getLogger(__name__)

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_COPY_BYTES_PER_S = 40e9  # PCIe 5 ×16 in practice; assumed, decides between swap and recompute
_HOST_KV_BYTES = 256 << 20  # with on=cpu; the system allocates memory when it is first written
_RESERVE_BYTES = 2 << 30  # graphs, library workspaces, fragmentation

WaitForTokens = Callable[[], StepResult]


class TorchCudaExecutor(ExecutorKind):
    """`seed` of the random weights (unused with a directory); `dtype` of weights and KV; `kv_dtype`
    of KV alone, in 8 bits; `memory_share` of the GPU for weights, steps and KV; `graphs` for decode
    steps; `fused_attention`: decodes and prompts in a single launch; `ahead`: steps planned ahead
    are launched before the tokens of the step before are read; `kernels` of Triton, or their plain
    twins; `on`: the device.
    """

    kind: ClassVar[str] = "torch_cuda"
    sizes_itself: ClassVar[bool] = True

    seed: int = Field(default=0, ge=0)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    kv_dtype: KvDtype = "auto"
    memory_share: float = Field(default=0.9, gt=0, le=0.98)
    graphs: bool = True
    fused_attention: bool = False
    ahead: bool = True
    kernels: Kernels = "triton"
    on: str = Field(default="cuda", pattern=r"^(cuda(:\d+)?|cpu)$")

    def build(self, site: Site) -> Executor:
        config = site.model.config
        _check_head_dim(config)
        stream = _stream(self.on)
        tuning = tuning_of(stream.gpu_name)
        chosen = ops(self.kernels, tuning)
        began_s = time.monotonic()
        weights = _weights(site.model, self.seed, stream.device, _DTYPES[self.dtype])
        model = PagedLlama(
            config,
            weights,
            chosen,
            site.block_tokens,
            site.max_model_len,
            self.kv_dtype,
            self.fused_attention,
        )
        n_blocks = site.n_blocks or _measured_blocks(
            model, chosen, site, stream, self.memory_share, tuning
        )
        built = TorchCuda(model, chosen, site, n_blocks, stream, self.graphs, self.ahead, tuning)
        built.warm_up()
        took_s = time.monotonic() - began_s
        log.info(
            "%s on %s: %d KV blocks of %d bytes, %.1f s",
            *(site.model.name, self.on, n_blocks, model.block_bytes, took_s),
        )
        return built


class DecodeGraph(NamedTuple):
    """A graph of decode steps: its inputs on each side, and the tokens that a replay writes."""

    sides: Sequence[DecodeInputs]
    replay: Callable[[], None]
    tokens: torch.Tensor


class Answers:
    """Host memory for the answers of a step of up to `n_rows` requests."""

    def __init__(self, n_rows: int, is_pinned: bool) -> None:
        n_top = n_rows * MOST_TOP_LOGPROBS
        self.tokens = torch.zeros(n_rows, dtype=torch.int64, pin_memory=is_pinned)
        self._chosen = torch.zeros(n_rows, pin_memory=is_pinned)
        self._top = TopTokens(
            torch.zeros(n_top, pin_memory=is_pinned),
            torch.zeros(n_top, dtype=torch.int64, pin_memory=is_pinned),
        )
        self.logprobs: tuple[torch.Tensor, TopTokens] | None = None  # on their way

    def receive_logprobs(self, chosen: torch.Tensor, top: TopTokens) -> None:
        """Start the copy of log-probabilities to `logprobs`."""
        ends = self._chosen, *self._top
        own, values, ids = (_copied(*pair) for pair in zip(ends, (chosen, *top), strict=True))
        self.logprobs = own, TopTokens(values, ids)


def _copied(room: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The leading part of `room`, in the shape of `values`, with a copy of them on its way."""
    place = room[: values.numel()].view(values.shape)
    place.copy_(values, non_blocking=True)
    return place


class TorchCuda:
    """The executor. Up to `SIDES` steps may be launched before the function that the first `launch`
    returned is called; these functions are called in the order of the launches.

    What a step sends and receives has a place in host memory for each side; on the device all steps
    use the same memory, as they are computed one after another. `_latest` holds the newest token of
    each row of the block tables: a step reads those that the host does not know yet."""

    def __init__(
        self,
        model: PagedLlama,
        chosen: Ops,
        site: Site,
        n_blocks: int,
        stream: DeviceStream,
        has_graphs: bool = True,
        is_ahead: bool = True,
        tuning: Tuning = DEFAULT_TUNING,
    ) -> None:
        self._model, self._ops, self._stream = model, chosen, stream
        self._is_ahead, self._tile_rows = is_ahead, tuning.chunk_rows
        self._max_model_len = site.max_model_len
        is_pinned, device, n_rows = stream.is_pinning, stream.device, site.max_num_seqs
        with allocating("kv_blocks", n_blocks, model.block_bytes, RuntimeError):
            # The engine's pool and the scratch block, which padding writes to.
            model.cache = model.memory(n_blocks + 1)
        with allocating("swap_blocks", site.n_host_blocks, model.block_bytes, RuntimeError):
            self._host = HostKv(model.cache, site.n_host_blocks, is_pinned)
        copy_s = model.block_bytes / _COPY_BYTES_PER_S
        self.caps = Caps(site.n_host_blocks, copy_s, n_blocks, stream.gpu, has_logits=True)
        config = model.config
        self._group = config.n_heads // config.n_kv_heads
        self._rows = RequestRows.of(n_rows, site.max_model_len, site.block_tokens, n_blocks)
        # A clone, as on the CPU `to` would return the host's own array.
        self._device_tables = torch.from_numpy(self._rows.tables.array).to(device).clone()
        self._flat_tables = self._device_tables.view(-1)
        self._sizes = buckets(n_rows)
        # The logits of all graphs share a buffer: graphs with their own would hold 156 MB per
        # size at 256 rows of Qwen's vocabulary.
        self._logits = torch.empty(n_rows, config.vocab_size, device=device)  # [S, V] float32
        self._latest = torch.zeros(2 * n_rows + 1, dtype=torch.int64, device=device)
        self._answers = [Answers(n_rows, is_pinned) for _ in range(SIDES)]
        self._side, self._n_running = 0, 0
        self._n_programs = n_decode_programs(
            config.n_kv_heads, stream.n_processors, tuning.decode_programs
        )
        self._kept_work = [KeptWork() for _ in range(SIDES)]  # in the decode arena
        decode_size = DecodeInputs.size(n_rows, self._n_programs)
        self._decode_arena = Arena(decode_size, device, is_pinned)
        self._mixed_arena = Arena(1 << 16, device, is_pinned)
        self._change_arena = Arena(1 << 12, device, is_pinned)
        self._special_arena = Arena(1 << 12, device, is_pinned)
        self._graphs: dict[int, DecodeGraph] = {}
        if has_graphs:
            self._capture()

    def execute(self, batch: StepBatch) -> StepResult:
        return self.launch(batch)()

    def warm_up(self) -> None:
        """Compute every kind of step once, so that no kernel is compiled while requests run:
        decodes and prompts, each alone and together, with every kind of sampling. They read and
        write the scratch block."""
        n = min(2, self._sizes[-1])
        # Two sizes, as Triton compiles kernels again for a size of 1.
        for name, n_tokens, rows in (
            ("prompts", 2, 0),
            ("prompts and a decode", 2, 1),
            ("prompts and decodes", 200, n),
        ):
            began_s = time.monotonic()
            self.execute(StepBatch(padding=Padding(n_tokens, rows, 0)))
            log.info("compiled %s: %.1f s", name, time.monotonic() - began_s)
        for n_special in range(1, n + 1):
            began_s = time.monotonic()
            requests = [_largest_request() for _ in range(n_special)]
            for request in requests:
                request.blocks = [self._rows.tables.scratch]
            batch = StepBatch(decodes=requests)
            self.execute(batch)  # by its graph
            with torch.inference_mode():
                self._compute(batch)()
            for request in requests:
                request.blocks = []  # returns their rows
            log.info("compiled %d decodes: %.1f s", n_special, time.monotonic() - began_s)

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> WaitForTokens:
        """Start a step; the returned function waits for its tokens."""
        assert self._n_running < SIDES, f"{SIDES} steps before were not waited for"
        self._stream.enter()
        rows, padding = batch.rows, batch.padding
        n_decode = len(batch.decodes) + padding.decode_rows
        if not (n_decode or rows or padding.prefill_tokens or batch.copies):
            # The side is not changed: the memory of the other may still be read.
            return StepResult
        self._side = (self._side + 1) % SIDES
        if batch.copies:
            self._host.copy_blocks(batch.copies, self._model.cache)
        bucket = bucket_of(n_decode, self._sizes)
        if n_decode and not rows and not padding.prefill_tokens and bucket in self._graphs:
            return self._replay(batch.decodes, padding, bucket)
        if n_decode or rows or padding.prefill_tokens:
            return self._compute(batch)
        # Copies alone are waited for, too: their block numbers are in memory that is reused.
        return self._fetch(torch.empty(0), [])

    def can_launch_ahead(self, batch: StepBatch) -> bool:
        """False if the host needs the values of unknown tokens, for penalties."""
        if not self._is_ahead:
            return False
        requests = [*batch.decodes, *(row.request for row in batch.rows)]
        return not self._rows.sampling.has_penalties(self._rows.tables.rows(requests))

    # --- decode steps

    def _replay(self, decodes: Sequence[Request], padding: Padding, bucket: int) -> WaitForTokens:
        sides, replay, tokens = self._graphs[bucket]
        inputs = sides[self._side]
        start = filler_start(padding, self._max_model_len)
        kept = self._kept_work[self._side]
        special_indices = inputs.write(decodes, padding.decode_rows, start, self._rows, kept)
        self._update_tables()
        inputs.fixed.send()
        places = range(len(decodes))
        special = self._send_special(places, decodes, special_indices)
        replay()
        if special is None:
            return self._fetch(tokens, places)
        draws = Draws.of(*inputs.on_device[5:])
        self._replace_special(tokens, special[1], draws, inputs.on_device[3])
        return self._fetch(tokens, places, special)

    @torch.inference_mode()
    def _capture(self) -> None:
        """Capture a graph per bucket, the largest first: the smaller graphs then find their memory
        in its pool."""
        began_s = time.monotonic()
        arena, n_programs = self._decode_arena, self._n_programs
        for bucket in reversed(self._sizes):
            sides = [DecodeInputs.in_arena(arena, bucket, n_programs, i) for i in range(SIDES)]
            sides[0].write([], 0, 0, self._rows, self._kept_work[0])
            sides[0].fixed.send()
            replay, tokens = self._stream.capture(partial(self._decode, sides[0]))
            self._graphs[bucket] = DecodeGraph(sides, replay, tokens)
        log.info("captured %d graphs: %.1f s", len(self._sizes), time.monotonic() - began_s)

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        step, draws = inputs.step(self._device_tables)
        step = step._replace(tokens=self._known(step.tokens, step.rows))
        logits = self._model.forward(step, self._logits)
        tokens = self._ops.sample(logits, draws.temperatures, draws.keys)
        self._latest.index_copy_(0, step.rows.long(), tokens)
        return tokens

    # --- any step

    def _compute(self, batch: StepBatch) -> WaitForTokens:
        inputs = mixed_inputs(
            batch,
            self._rows,
            self._group,
            self._max_model_len,
            self._n_programs,
            self._tile_rows,
        )
        self._update_tables()
        self._mixed_arena.reset(inputs.size)
        step, draws, rows = inputs.put(self._mixed_arena, self._device_tables, self._n_programs)
        if inputs.has_unknown:
            decoding = step.tokens[: step.n_decode]
            decoding.copy_(self._known(decoding, step.rows))
        special = self._send_special(inputs.places, inputs.requests, inputs.special)
        logits = self._model.forward(step, self._logits)
        if not inputs.places:
            return self._fetch(torch.empty(0), [])
        tokens = self._ops.sample(logits, draws.temperatures, draws.keys)
        if special is None:
            self._latest.index_copy_(0, rows.long(), tokens)
        else:
            self._replace_special(tokens, special[1], draws, rows)
        return self._fetch(tokens, inputs.places, special)

    # --- both

    def _known(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`tokens` [n] with the UNKNOWN replaced by the newest of their table rows [n]."""
        return torch.where(tokens < 0, self._latest.index_select(0, rows), tokens)

    def _replace_special(
        self, tokens: torch.Tensor, special: SpecialOnDevice, draws: Draws, rows: torch.Tensor
    ) -> None:
        """Choose the tokens of the special requests of a step with `draws`, whose sampled tokens
        belong to table `rows`, and write them to `tokens` and `_latest`."""
        chosen = choose_special(self._logits, draws, special, self._ops.sample)
        tokens.index_copy_(0, special.rows, chosen.tokens)
        self._latest.index_copy_(0, rows.long(), tokens)
        if chosen.logprobs is not None and chosen.top is not None:
            self._answers[self._side].receive_logprobs(chosen.logprobs, chosen.top)

    def _send_special(
        self, places: Sequence[int], requests: Sequence[Request], indices: Sequence[int]
    ) -> tuple[SpecialSampling, SpecialOnDevice] | None:
        """Send the sampling of the special requests ahead of the step, so that nothing is sent
        while it runs. It is read now and not when the tokens arrive: by then a request may have
        been given its next token, and its bans may have ended."""
        if not indices:
            return None
        special = special_sampling(places, requests, indices, self._model.config.vocab_size)
        self._special_arena.reset(special.size)
        return special, special.put(self._special_arena)

    def _fetch(
        self,
        tokens: torch.Tensor,
        places: Sequence[int],
        special: tuple[SpecialSampling, SpecialOnDevice] | None = None,
    ) -> WaitForTokens:
        """Start the copy of `tokens` to the host; `places[i]` is the index of the i-th answer among
        them. The log-probabilities of `special` requests are on their way already."""
        n, received = len(tokens), self._answers[self._side]
        logprobs, received.logprobs = received.logprobs, None
        received.tokens[:n].copy_(tokens, non_blocking=True)
        wait_for_device = self._stream.record()
        self._n_running += 1

        def wait() -> StepResult:
            wait_for_device()
            self._n_running -= 1
            by_place: list[int] = received.tokens[:n].tolist()
            answers = [by_place[place] for place in places]
            if special is None or logprobs is None:
                return StepResult(answers)
            return StepResult(answers, special[0].all_logprobs(*logprobs, len(answers)))

        return wait

    def _update_tables(self) -> None:
        at, values = self._rows.tables.changes()
        if len(at):
            self._change_arena.reset(2 * aligned(2 * len(at)))
            # As pairs of int32: a conversion on the device would be another launch.
            indices = self._change_arena.put(at.view(np.int32)).view(torch.int64)
            blocks = self._change_arena.put(values)
            self._change_arena.send()
            self._flat_tables.index_copy_(0, indices, blocks)


def _stream(on: str) -> DeviceStream:
    if on == "cpu":
        torch.set_num_threads(1)
        return CpuStream()
    if not torch.cuda.is_available():
        raise MissingDependency(
            f"device: 'cuda' needs an NVIDIA GPU and a CUDA build of torch; torch "
            f"{torch.__version__} finds none here (device=cpu runs the same models)"
        )
    n, device = torch.cuda.device_count(), torch.device(on)
    if (device.index or 0) >= n:
        raise UsageError(f"on: there is no '{on}'; this machine has cuda:0 to cuda:{n - 1}")
    return CudaStream(torch.device("cuda", device.index or 0))


def _weights(source: ModelSource, seed: int, device: torch.device, dtype: torch.dtype) -> Weights:
    try:
        return load(source, seed, device, dtype)
    except torch.OutOfMemoryError as error:
        n_bytes, reason = source.config.n_params * dtype.itemsize, str(error).partition("\n")[0]
        raise UsageError(
            f"shape: '{source.name}' needs {n_bytes / 1e9:.1f} GB for its weights, which do not "
            f"fit; choose a smaller shape: {reason}"
        ) from error


def _check_head_dim(config: ModelConfig) -> None:
    dim = config.head_dim
    if dim < 16 or dim & (dim - 1):
        raise UsageError(
            f"shape: heads of {dim} numbers; the kernels need a power of two of at least 16 "
            "(device=cpu computes any)"
        )


def _largest_request() -> Request:
    """A request at its first token that needs all the memory that the choice of a token can take: a
    sort and sums in float64 of every logit."""
    sampling = Sampling(
        temperature=1.0, top_p=0.9, top_k=50, logprobs=True, top_logprobs=MOST_TOP_LOGPROBS
    )
    stop_ids = frozenset({0})
    return Request(
        "trial", [0], 1, 0.0, min_tokens=1, stop_ids=stop_ids, sampling=sampling, blocks=[0]
    )


@torch.inference_mode()
def _measured_blocks(
    model: PagedLlama,
    chosen: Ops,
    site: Site,
    stream: DeviceStream,
    share: float,
    tuning: Tuning = DEFAULT_TUNING,
) -> int:
    """KV blocks that fit next to the weights and the largest possible step, which is computed once
    to measure its memory."""

    def largest_step() -> None:
        trial = TorchCuda(model, chosen, site, 1, stream, has_graphs=False, tuning=tuning)
        decodes = [_largest_request() for _ in range(site.max_num_seqs)]
        padding = Padding(max(1, site.max_step_tokens - site.max_num_seqs), 0, 0)
        trial.execute(StepBatch(decodes=decodes, padding=padding))
        model.cache = model.memory(0)  # releases the trial's KV

    try:
        memory = stream.memory_during(largest_step)
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"max_num_seqs: a step of {site.max_num_seqs} requests and {site.max_step_tokens} "
            f"tokens does not fit next to the weights; lower max_num_seqs or the token budget: "
            f"{reason}"
        ) from error
    if memory is None:
        return max(_HOST_KV_BYTES // model.block_bytes, -(-site.max_model_len // site.block_tokens))
    used_bytes = memory.peak + memory.others
    return blocks_that_fit(memory.total, used_bytes, share, _RESERVE_BYTES, model.block_bytes)


def buckets(max_rows: int) -> tuple[int, ...]:
    """Sizes of decode steps that have a graph: 1, 2, 4, 8, then multiples of 16 up to 256, then of
    64; the last is `max_rows`.

    A step is rounded up to the next size. The added rows cost at most as much as the unused part of
    a matrix multiplication's tile would have cost anyway.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, max_rows + 64, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def bucket_of(n_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds `n_rows`; None if none does."""
    at = bisect_left(sizes, n_rows)
    return sizes[at] if at < len(sizes) else None
