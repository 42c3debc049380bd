"""Each kernel's time, and the share of the ceiling that it reaches.

Calls are captured in one CUDA graph, whose replay is timed: so the engine runs them when it
decodes, and a kernel may well take less time than Python takes to launch it (one layer's KV of 32
sequences at 1 024 is read in 31 µs at 4.3 TB/s).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Ops
from reference_engine.kernels.tiles import PromptPiece, Tiles, cut_tiles, splits_for
from reference_engine.model.llama import rotary_tables
from reference_engine.state.model_config import ModelConfig
from rig.gpu_ceilings import Ceilings, Place, timed_s
from rig.gpu_flash import gathered_flash, refuse_another_answer

PAGE = 16
CALLS = 20  # of one replay
_UNCACHED = 1 << 28  # bytes of inputs taken in turns, so that none is still in a cache of 50 MB


@dataclass(frozen=True)
class Timed:
    """`share` is of copy bandwidth or of the multiplication rate, as `of` says."""

    kernel: str
    case: str
    seconds: float
    share: float
    of: str


def all_kernels(ops: Ops, config: ModelConfig, place: Place, top: Ceilings) -> list[Timed]:
    """The kernels at the sizes of `config` (the 8b shape on a GPU)."""
    out = []
    for n_rows in (1, 32, 256):
        rows = place.rows(n_rows)
        out += [
            _decode(ops, config, place, top, rows, context // place.scale)
            for context in (1024, 8192)
        ]
    for start in (0, 8192):
        out += _chunk(ops, config, place, top, 2048 // place.scale, start // place.scale)
    n_tokens = 8192 // place.scale
    out += _pointwise(ops, config, place, top, n_tokens)
    out.append(_sample(ops, config, place, top, 256 // min(place.scale, 64)))
    return out


def replayed_s(work: Callable[[], object], place: Place, n: int = CALLS) -> float:
    """Seconds of one of `n` calls in a graph; without CUDA, of calls."""
    if place.cuda is None:
        return timed_s(work, place, n)
    n = n if place.scale == 1 else 1
    for _ in range(3):
        work()  # compiles
    place.synchronise()
    graph = place.cuda.CUDAGraph()
    with place.cuda.graph(graph):
        for _ in range(n):
            work()
    return timed_s(graph.replay, place, 1) / n


def decode_bytes(config: ModelConfig, n_rows: int, context: int, itemsize: int) -> int:
    """What one layer's attention must read of K and V."""
    return 2 * n_rows * context * config.n_kv_heads * config.head_dim * itemsize


def chunk_flops(config: ModelConfig, n_tokens: int, start: int) -> float:
    """q·k and p·v of the causal half and of what stands before it."""
    pairs = n_tokens * start + n_tokens * (n_tokens + 1) / 2
    return 4 * config.n_heads * config.head_dim * pairs


def _decode(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, n_rows: int, context: int
) -> Timed:
    width = -(-context // PAGE)
    cache = _cache(config, place, n_rows * width)
    order = torch.randperm(n_rows * width).to(torch.int32)
    tables = order.view(n_rows, width).to(place.device)
    rows = torch.arange(n_rows, dtype=torch.int32, device=place.device)
    contexts = torch.full_like(rows, context)
    q = torch.randn(n_rows, config.n_heads, config.head_dim, device=place.device).to(place.dtype)
    n_splits = splits_for(n_rows, config.n_kv_heads, place.n_processors)
    n_bytes = decode_bytes(config, n_rows, context, place.dtype.itemsize)
    n_sets = min(CALLS, -(-_UNCACHED // n_bytes))
    caches = [cache, *(Kv(cache.numbers.clone()) for _ in range(n_sets - 1))]
    turns = cycle(caches)
    seconds = replayed_s(
        lambda: ops.decode_attention(q, next(turns), tables, rows, contexts, n_splits), place
    )
    share = n_bytes / seconds / top.copy_bytes_per_s
    return Timed("decode attention", f"batch {n_rows}, context {context}", seconds, share, "copy")


def _chunk(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, n_tokens: int, start: int
) -> list[Timed]:
    """A piece of a prompt by the kernel, and by torch's FlashAttention over gathered KV."""
    width = -(-(start + n_tokens) // PAGE)
    cache = _cache(config, place, width)
    tables = torch.randperm(width).to(torch.int32).view(1, width).to(place.device)
    tiles = Tiles(
        torch.from_numpy(
            cut_tiles([PromptPiece(0, 0, n_tokens, start)], config.n_heads // config.n_kv_heads)
        ).to(place.device)
    )
    q = torch.randn(n_tokens, config.n_heads, config.head_dim, device=place.device).to(place.dtype)

    def kernel() -> torch.Tensor:
        return ops.chunk_attention(q, cache, tables, tiles)

    works = {"chunk attention": kernel}
    case, fate = f"{n_tokens} after {start}", ""
    theirs = gathered_flash(q, cache, tables[0], start, place)
    try:
        refuse_another_answer(theirs(), kernel())
        works["gather + torch's flash"] = theirs
    except RuntimeError as error:  # a torch built without it; the kernel's own time is still good
        fate = f" (torch's flash not run: {str(error).splitlines()[0]})"
    found = {name: replayed_s(work, place, 5) for name, work in works.items()}
    if len(found) > 1:
        fastest = min(found, key=found.__getitem__)
        fates = {name: ", the faster one" if name == fastest else "" for name in found}
    else:
        fates = dict.fromkeys(found, fate)
    flops = chunk_flops(config, n_tokens, start)
    return [
        Timed(name, case + fates[name], seconds, flops / seconds / top.matmul_flops, "matmul")
        for name, seconds in found.items()
    ]


def _pointwise(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, n_tokens: int
) -> list[Timed]:
    size, d, ffn = place.dtype.itemsize, config.d_model, config.d_ffn

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=place.device).to(place.dtype)

    residual, delta, weight = drawn(n_tokens, d), drawn(n_tokens, d), drawn(d)
    gate_up = drawn(n_tokens, 2 * ffn)
    width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    qkv = drawn(n_tokens, width)
    cache = _cache(config, place, n_tokens // PAGE + 1)
    at = torch.arange(n_tokens, dtype=torch.int32, device=place.device)
    cos, sin = (table.to(place.device) for table in rotary_tables(config, n_tokens))
    works = {
        "residual + norm": (
            lambda: ops.add_rms_norm(residual, delta, weight, 1e-5),
            4 * n_tokens * d * size,
        ),
        "silu·mul": (lambda: ops.silu_mul(gate_up), 3 * n_tokens * ffn * size),
        "rope + KV write": (
            lambda: ops.rope_write(qkv, at, at, (cos, sin), None, 1e-5, cache),
            2 * n_tokens * width * size,
        ),
    }
    out = []
    for name, (work, n_bytes) in works.items():
        seconds = replayed_s(work, place)
        share = n_bytes / seconds / top.copy_bytes_per_s
        out.append(Timed(name, f"{n_tokens} tokens", seconds, share, "copy"))
    return out


def _sample(ops: Ops, config: ModelConfig, place: Place, top: Ceilings, n_rows: int) -> Timed:
    logits = torch.randn(n_rows, config.vocab_size, device=place.device)
    temperatures = torch.full((n_rows,), 0.8, device=place.device)
    keys = torch.arange(2 * n_rows, dtype=torch.int32, device=place.device).view(n_rows, 2)
    seconds = replayed_s(lambda: ops.sample(logits, temperatures, keys), place)
    share = logits.numel() * 4 / seconds / top.copy_bytes_per_s
    return Timed("sampling", f"{n_rows} rows", seconds, share, "copy")


def _cache(config: ModelConfig, place: Place, n_blocks: int) -> Kv:
    shape = (n_blocks, 2, config.n_kv_heads, PAGE, config.head_dim)
    return Kv(torch.randn(shape, device=place.device, dtype=torch.float32).to(place.dtype))
