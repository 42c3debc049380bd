"""The time of each kernel and its share of the ceiling, and torch's FlashAttention for comparison.

Calls are captured in a CUDA graph, and its replay is timed. The engine decodes like that, and a
kernel may take less time than Python takes to launch it (a layer's KV of 32 sequences at 1 024 is
read in 31 µs at 4.3 TB/s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Ops
from reference_engine.kernels.tiles import (
    DEFAULT_TUNING,
    PromptPiece,
    Tiles,
    Tuning,
    cut_tiles,
    n_decode_programs,
    planned,
)
from reference_engine.model.llama import rotary_tables
from reference_engine.state.model_config import KvDtype, ModelConfig
from rig.gpu_ceilings import Ceilings, Place, Repeats, repeated, timed_s

PAGE = 16
CALLS = 20  # per replay
_UNCACHED = 1 << 28  # bytes of inputs used in turn, so that none is still in a cache of 50 MB
_TOLERANCE = 0.03  # of the largest number: bfloat16 summed in another order


@dataclass(frozen=True)
class KernelTiming:
    """`share` is a share of the copy bandwidth (`of` is "copy") or of the multiplication rate
    ("matmul"); `each_s` are the repetitions behind `seconds`."""

    kernel: str
    case: str
    seconds: float
    share: float
    of: str
    each_s: tuple[float, ...]


Case = tuple[str, Callable[[], list[KernelTiming]]]


def kernel_cases(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, tuning: Tuning = DEFAULT_TUNING
) -> Iterator[Case]:
    """(name, measurement) of the kernels at the sizes of `config` (the 8b shape on a GPU); `tuning`
    is that of `ops`."""
    for n_rows in (1, 32, 256):
        rows = place.rows(n_rows)
        for context in (1024, 8192):
            contexts = [context // place.scale] * rows
            yield (
                f"decode attention, batch {rows}, context {contexts[0]}",
                partial(decode_timings, ops, config, place, top, contexts, "", tuning),
            )
    for start in (0, 8192):
        n_tokens, first = 2048 // place.scale, start // place.scale
        name = f"chunk attention, {n_tokens} after {first}"
        yield name, partial(chunk_timings, ops, config, place, top, n_tokens, first, tuning)
    n_tokens = 8192 // place.scale
    yield "pointwise kernels", partial(_pointwise, ops, config, place, top, n_tokens)
    n_rows = 256 // min(place.scale, 64)
    yield "sampling", partial(_sample, ops, config, place, top, n_rows)


def replayed(work: Callable[[], object], place: Place, n: int = CALLS) -> Repeats:
    """Seconds per call of `n` calls in a graph, timed twice; without CUDA, of plain calls."""
    if place.cuda is None:
        return repeated(lambda: timed_s(work, place, n))
    n = n if place.scale == 1 else 1
    for _ in range(3):
        work()  # compiles
    place.synchronise()
    graph = place.cuda.CUDAGraph()
    with place.cuda.graph(graph):
        for _ in range(n):
            work()
    return repeated(lambda: timed_s(graph.replay, place, 1) / n)


def decode_bytes(config: ModelConfig, context_tokens: int, itemsize: int) -> int:
    """Bytes of K and V of `context_tokens` tokens that a layer's attention must read."""
    return 2 * context_tokens * config.n_kv_heads * config.head_dim * itemsize


def chunk_flops(config: ModelConfig, n_tokens: int, start: int) -> float:
    """Operations of q·k and p·v for the causal half and for the positions before `start`."""
    pairs = n_tokens * start + n_tokens * (n_tokens + 1) / 2
    return 4 * config.n_heads * config.head_dim * pairs


def decode_timings(
    ops: Ops,
    config: ModelConfig,
    place: Place,
    top: Ceilings,
    contexts: Sequence[int],
    case: str = "",
    tuning: Tuning = DEFAULT_TUNING,
    kv_dtype: KvDtype = "auto",
) -> list[KernelTiming]:
    """Decode attention of a sequence at each of `contexts`; `case` names the mix of contexts. Of
    `tuning` only `decode_programs` counts, the others are those of `ops`."""
    n_rows, widths = len(contexts), [-(-context // PAGE) for context in contexts]
    cache = random_kv(config, place, sum(widths), kv_dtype)
    order, first = torch.randperm(sum(widths)), 0
    tables = torch.zeros(n_rows, -(-max(widths) // 16) * 16, dtype=torch.int32)
    for row, width in zip(tables, widths, strict=True):
        row[:width] = order[first : first + width]
        first += width
    tables = tables.to(place.device)
    rows = torch.arange(n_rows, dtype=torch.int32, device=place.device)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=place.device)
    q = torch.randn(n_rows, config.n_heads, config.head_dim, device=place.device).to(place.dtype)
    n_programs = n_decode_programs(config.n_kv_heads, place.n_processors, tuning.decode_programs)
    work = planned(contexts, n_programs, place.device)
    per_token = config.kv_bytes_per_token(place.dtype.itemsize, kv_dtype) / config.n_layers
    n_bytes = int(sum(contexts) * per_token)
    n_sets = min(CALLS, -(-_UNCACHED // n_bytes))
    caches = [cache, *(random_kv(config, place, sum(widths), kv_dtype) for _ in range(n_sets - 1))]
    turns = cycle(caches)
    took = replayed(
        lambda: ops.decode_attention(q, next(turns), tables, rows, lengths, work), place
    )
    share = n_bytes / took.seconds / top.copy_bytes_per_s
    case = case or f"batch {n_rows}, context {contexts[0]}"
    return [KernelTiming("decode attention", case, took.seconds, share, "copy", took.each_s)]


def chunk_timings(
    ops: Ops,
    config: ModelConfig,
    place: Place,
    top: Ceilings,
    n_tokens: int,
    start: int,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[KernelTiming]:
    """A piece of a prompt: by our kernel, and by torch's FlashAttention after gathering the KV. Of
    `tuning` only `chunk_rows` counts, the others are those of `ops`."""
    width = -(-(start + n_tokens) // PAGE)
    cache = random_kv(config, place, width, "auto")
    tables = torch.randperm(width).to(torch.int32).view(1, width).to(place.device)
    group = config.n_heads // config.n_kv_heads
    cut = cut_tiles([PromptPiece(0, 0, n_tokens, start)], group, tuning.chunk_rows)
    tiles = Tiles(torch.from_numpy(cut).to(place.device))
    q = torch.randn(n_tokens, config.n_heads, config.head_dim, device=place.device).to(place.dtype)

    def kernel() -> torch.Tensor:
        return ops.chunk_attention(q, cache, tables, tiles)

    works = {"chunk attention": kernel}
    case, reason = f"{n_tokens} after {start}", ""
    flash = gathered_flash(q, cache, tables[0], start, place)
    try:
        check_equal(flash(), kernel())
        works["gather + torch's flash"] = flash
    except RuntimeError as error:  # a torch built without it; our kernel's time still counts
        reason = f" (torch's flash not run: {str(error).splitlines()[0]})"
    times = {name: replayed(work, place, 5) for name, work in works.items()}
    if len(times) > 1:
        fastest = min(times, key=lambda name: times[name].seconds)
        notes = {name: ", faster" if name == fastest else "" for name in times}
    else:
        notes = dict.fromkeys(times, reason)
    flops = chunk_flops(config, n_tokens, start)
    return [
        KernelTiming(
            name,
            case + notes[name],
            took.seconds,
            flops / took.seconds / top.matmul_flops,
            "matmul",
            took.each_s,
        )
        for name, took in times.items()
    ]


def _pointwise(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, n_tokens: int
) -> list[KernelTiming]:
    size, d, ffn = place.dtype.itemsize, config.d_model, config.d_ffn

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=place.device).to(place.dtype)

    residual, delta, weight = random(n_tokens, d), random(n_tokens, d), random(d)
    gate_up = random(n_tokens, 2 * ffn)
    width = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    qkv = random(n_tokens, width)
    cache = random_kv(config, place, n_tokens // PAGE + 1, "auto")
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
        took = replayed(work, place)
        share = n_bytes / took.seconds / top.copy_bytes_per_s
        case = f"{n_tokens} tokens"
        out.append(KernelTiming(name, case, took.seconds, share, "copy", took.each_s))
    return out


def _sample(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, n_rows: int
) -> list[KernelTiming]:
    logits = torch.randn(n_rows, config.vocab_size, device=place.device)
    temperatures = torch.full((n_rows,), 0.8, device=place.device)
    keys = torch.arange(2 * n_rows, dtype=torch.int32, device=place.device).view(n_rows, 2)
    took = replayed(lambda: ops.sample(logits, temperatures, keys), place)
    share = logits.numel() * 4 / took.seconds / top.copy_bytes_per_s
    return [KernelTiming("sampling", f"{n_rows} rows", took.seconds, share, "copy", took.each_s)]


def random_kv(config: ModelConfig, place: Place, n_blocks: int, kv_dtype: KvDtype) -> Kv:
    """A layer's memory of random numbers."""
    shape = (n_blocks, 2, config.n_kv_heads, PAGE, config.head_dim)
    kv = Kv.zeros(shape, place.dtype, kv_dtype, torch.device(place.device))
    if kv.scales is None:
        kv.numbers.copy_(torch.randn(shape, device=place.device))
    else:
        kv.scales.fill_(0.02)
        # As bits: below 0x70 every pattern is a finite number of both formats.
        kv.parts()[0].copy_(torch.randint(0, 0x70, shape, device=place.device))
    return kv


def gathered_flash(
    q: torch.Tensor, cache: Kv, table: torch.Tensor, start: int, place: Place
) -> Callable[[], torch.Tensor]:
    """Attention of a piece of a prompt by torch's FlashAttention, `q` [n, Hq, hd] at positions
    `start` …, over the blocks of `table` [width].

    It cannot read pages, so that an engine would gather KV in each layer: a copy and a launch. The
    indices for the copy are computed once, as in a step. On a CPU torch's SDPA stands in.
    """
    n_context = start + len(q)
    _, _, n_kv, size, head_dim = cache.numbers.shape
    at = torch.arange(n_context, device=q.device)
    planes = torch.arange(2 * n_kv, device=q.device).view(2, 1, n_kv)  # K and V of each head
    blocks = table.long()[at // size].view(1, -1, 1)
    vectors = ((blocks * 2 * n_kv + planes) * size + (at % size).view(1, -1, 1)).reshape(-1)
    flat = cache.numbers.view(-1, head_dim)
    ends = [torch.tensor([0, n], dtype=torch.int32, device=q.device) for n in (len(q), n_context)]

    def attend() -> torch.Tensor:
        k, v = flat.index_select(0, vectors).view(2, n_context, n_kv, head_dim).unbind()
        return flash_attention(q, k, v, ends) if place.is_gpu else _sdpa(q, k, v, start)

    return attend


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[torch.Tensor]
) -> torch.Tensor:
    """Causal attention, the last query at the last key. `ends` are the bounds of queries and of
    keys, [2] each.

    The operator behind `torch.nn.attention.varlen`, which in torch 2.11 does not pass on that the
    operator accepts fewer KV heads than query heads.
    """
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, len(q), len(k), 0.0, True, False
    )[0]
    return out


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    visible = torch.ones(len(q), len(k), dtype=torch.bool).tril_(start)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out.transpose(0, 1)


def check_equal(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises RuntimeError if the outputs differ by more than rounding: times of different
    computations cannot be compared."""
    error = float((output - expected).abs().max() / expected.abs().max())
    if not error <= _TOLERANCE:
        raise RuntimeError(f"its output is off by {error:.3g} of the largest number")
