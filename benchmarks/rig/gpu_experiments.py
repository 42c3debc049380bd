"""Measurements without a goal: attention in a single launch, KV in 8 bits, and a GPU in two
parts."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reference_engine.kernels.ops import Ops
from reference_engine.kernels.tiles import (
    PromptPiece,
    Tiles,
    Tuning,
    cut_tiles,
    n_decode_programs,
    planned,
)
from reference_engine.model.zoo import SHAPES
from reference_engine.state.model_config import KvDtype, ModelConfig
from rig.gpu_ceilings import Ceilings, Place, repeated, timed_s
from rig.gpu_kernels import PAGE, random_kv
from rig.gpu_session import Session

KV_DTYPES: tuple[KvDtype, ...] = ("auto", "fp8", "int8")
SHARES = (0.25, 0.5, 0.75)
_GRANULE = 8  # the driver divides an H100 or H200 into parts of so many multiprocessors


def experiments(session: Session) -> None:
    """Measurements for open decisions; they have no goals."""
    config, figures = SHAPES[session.shape("8b")], dict[str, Any](attention={})

    def measure_kv(kv_dtype: KvDtype) -> None:
        figures["attention"][kv_dtype] = _attention(
            session.ops(), config, session.place, session.top, kv_dtype, session.tuning
        )
        session.results.add("experiments", figures)

    for kv_dtype in KV_DTYPES:
        session.attempt(f"experiments, {kv_dtype}", partial(measure_kv, kv_dtype))
    figures["parts of a GPU"] = parts_of_a_gpu(session.place, split_gpu)
    session.results.add("experiments", figures)


def _attention(
    ops: Ops,
    config: ModelConfig,
    place: Place,
    top: Ceilings,
    kv_dtype: KvDtype,
    tuning: Tuning,
) -> dict[str, float]:
    """Attention of a layer: 32 decodes at 4096 and a piece of 512 tokens after 2048, in two
    launches and in one, and decoding as a share of the copy's bandwidth."""
    n_rows, context = place.rows(32), 4096 // place.scale
    n_tokens, start = 512 // place.scale, 2048 // place.scale
    widths = [-(-context // PAGE)] * n_rows + [-(-(start + n_tokens) // PAGE)]
    n_blocks = sum(widths)
    tables = torch.zeros(n_rows + 1, max(widths), dtype=torch.int32)
    order = torch.randperm(n_blocks).to(torch.int32)
    for row, width in enumerate(widths):
        tables[row, :width], order = order[:width], order[width:]
    tables = tables.to(place.device)
    cache = random_kv(config, place, n_blocks, kv_dtype)
    rows = torch.arange(n_rows, dtype=torch.int32, device=place.device)
    contexts = torch.full_like(rows, context)
    group = config.n_heads // config.n_kv_heads
    pieces = [PromptPiece(n_rows, 0, n_tokens, start)]
    tiles = Tiles(torch.from_numpy(cut_tiles(pieces, group, tuning.chunk_rows)).to(place.device))
    shape = (n_rows + n_tokens, config.n_heads, config.head_dim)
    q = torch.randn(shape, device=place.device).to(place.dtype)
    n_programs = n_decode_programs(config.n_kv_heads, place.n_processors, tuning.decode_programs)
    work = planned([context] * n_rows, n_programs, place.device)

    def decode() -> torch.Tensor:
        return ops.decode_attention(q[:n_rows], cache, tables, rows, contexts, work)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return decode(), ops.chunk_attention(q[n_rows:], cache, tables, tiles)

    def fused() -> torch.Tensor:
        return ops.fused_attention(q, cache, tables, rows, contexts, work, tiles)

    decode_s = repeated(lambda: timed_s(decode, place)).seconds
    n_bytes = config.kv_bytes_per_token(place.dtype.itemsize, kv_dtype) / config.n_layers
    return {
        "decode_s": decode_s,
        "decode_share": n_rows * context * n_bytes / decode_s / top.copy_bytes_per_s,
        "two_launches_s": repeated(lambda: timed_s(both, place)).seconds,
        "one_launch_s": repeated(lambda: timed_s(fused, place)).seconds,
    }


@dataclass(frozen=True)
class GpuPart:
    """A stream whose kernels run on multiprocessors of its own."""

    processors: int
    stream: Any


Split = Callable[[int], tuple[GpuPart, GpuPart]]


def parts_of_a_gpu(place: Place, split: Split) -> list[dict[str, Any]] | str:
    """The rates of a copy and a multiplication that run at the same time: on the whole GPU, then on
    two parts of it, for several shares of the copy.

    The question behind it: would decoding, which waits for memory, and prompts, which multiply,
    gain from multiprocessors of their own? `together` is the sum of both rates as shares of those
    alone on the whole GPU: taking turns would give 1. Returns the reason where it cannot run.
    """
    if place.cuda is None:
        return "not run: there is no GPU"
    counts = [max(_GRANULE, int(place.n_processors * s) // _GRANULE * _GRANULE) for s in SHARES]
    try:
        pairs = [split(n) for n in counts]
    except (ImportError, RuntimeError) as error:
        return f"not run: {error}"
    copy, multiply = _loads(place)
    streams = (place.cuda.Stream(device=place.device) for _ in range(2))
    whole = [GpuPart(place.n_processors, stream) for stream in streams]
    alone = _rates(place, whole, copy, multiply)
    results = [alone | _together(alone, alone)]
    for pair in pairs:
        rates = _rates(place, pair, copy, multiply)
        results.append(rates | _together(rates, alone))
    return results


@dataclass(frozen=True)
class Load:
    """Repeated work in a stream; `amount` is the bytes moved or the operations computed each
    time."""

    work: Callable[[], object]
    amount: float
    stream: Any

    def launch(self, cuda: Any, n: int) -> None:
        with cuda.stream(self.stream):
            for _ in range(n):
                self.work()


def _together(rates: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    names = ("copy_bytes_per_s", "matmul_flops")
    return {"together": sum(rates[name] / alone[f"{name}_alone"] for name in names)}


def _loads(place: Place) -> tuple[tuple[Callable[[], object], float], ...]:
    """(work, amount) of a kernel that reads and writes 1 GiB, and of a multiplication. The driver's
    own copy would not stay on the multiprocessors of a part."""
    source = torch.ones((1 << 28) // place.scale, device=place.device)
    target = torch.empty_like(source)
    n = 8192 // min(place.scale, 32)
    a, b = (torch.randn(n, n, device=place.device).to(place.dtype) for _ in range(2))
    product = torch.empty_like(a)
    return (
        (lambda: torch.neg(source, out=target), 2.0 * source.numel() * source.itemsize),
        (lambda: torch.mm(a, b, out=product), 2.0 * n**3),
    )


def _rates(
    place: Place,
    parts: tuple[GpuPart, GpuPart] | list[GpuPart],
    copy: tuple[Callable[[], object], float],
    multiply: tuple[Callable[[], object], float],
) -> dict[str, Any]:
    copying, multiplying = Load(*copy, parts[0].stream), Load(*multiply, parts[1].stream)
    return {
        "processors": [part.processors for part in parts],
        "copy_bytes_per_s_alone": rate(place, copying),
        "matmul_flops_alone": rate(place, multiplying),
        "copy_bytes_per_s": rate(place, copying, other=multiplying),
        "matmul_flops": rate(place, multiplying, other=copying),
    }


def rate(place: Place, load: Load, other: Load | None = None) -> float:
    """Amount per second while `other` works from the beginning to the end: its number of
    repetitions is doubled until it outlasts `load`."""
    n, n_other = (20, 40) if place.scale == 1 else (1, 1)
    for trial in (load, other):
        if trial is not None:
            trial.launch(place.cuda, 3)  # libraries allocate their workspaces per stream
    while True:
        place.synchronise()
        if other is not None:
            other.launch(place.cuda, n_other)
        began_s = time.perf_counter()
        load.launch(place.cuda, n)
        load.stream.synchronize()
        took_s = time.perf_counter() - began_s
        outlasted = other is None or not other.stream.query()
        place.synchronise()
        if outlasted:
            return n * load.amount / took_s
        n_other *= 2


def split_gpu(n: int) -> tuple[GpuPart, GpuPart]:
    """The GPU as `n` multiprocessors and the rest, by the driver's green contexts. Those of torch
    all begin at the first multiprocessor, so that two of them would overlap. Raises ImportError
    without NVIDIA's Python bindings, RuntimeError with the driver's error code."""
    driver: Any = importlib.import_module("cuda.bindings.driver")  # comes with CUDA builds of torch
    cuda: Any = torch.cuda

    def call(name: str, *arguments: Any) -> Any:
        code, *rest = getattr(driver, name)(*arguments)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {code.name}")
        return rest[0] if len(rest) == 1 else rest

    device = call("cuDeviceGet", cuda.current_device())
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = call("cuDeviceGetDevResource", device, kind)
    groups, _, rest = call("cuDevSmResourceSplitByCount", 1, whole, 0, n)
    parts = []
    for resource in (groups[0], rest):
        description = call("cuDevResourceGenerateDesc", [resource], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call("cuGreenCtxCreate", description, device, flags)
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = call("cuGreenCtxStreamCreate", context, non_blocking, 0)
        parts.append(GpuPart(resource.sm.smCount, cuda.ExternalStream(int(stream))))
    return parts[0], parts[1]
