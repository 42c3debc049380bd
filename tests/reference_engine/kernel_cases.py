"""Random inputs for every kernel, compared with its twin in float64; for the interpreter and a GPU.

Not collected by itself: `interpreted_kernels.py` runs it in Triton's interpreter, `tests/gpu` on a
device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from reference_engine.kernels import plain
from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Ops, Sample, ops
from reference_engine.kernels.tiles import (
    DEFAULT_TUNING,
    PromptPiece,
    Tiles,
    Tuning,
    cut_tiles,
    planned,
)
from reference_engine.model.llama import rotary_tables
from reference_engine.state.model_config import KvDtype, ModelConfig

VARIANTS = (
    Tuning(32, 5, decode_programs=4),
    Tuning(128, 2, 8, chunk_keys=128, chunk_warps=8),
    Tuning(chunk_rows=128, chunk_warps=8),
    Tuning(dequantise=True),
)
"""Choices that the GPU suite's part `sweep` times, each with another kernel."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def kernels(tuning: Tuning = DEFAULT_TUNING) -> Ops:
    """Triton's kernels, with NaN in all memory that they allocate: what they do not write fails."""
    return Ops(*(partial(_in_poisoned_memory, operation) for operation in ops("triton", tuning)))


def _in_poisoned_memory(operation: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    torch.use_deterministic_algorithms(True)  # torch then fills new tensors
    try:
        return operation(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Paged:
    """A paged memory with a sequence per context, its blocks scattered over the memory."""

    cache: Kv
    tables: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def make(
        cls,
        contexts: list[int],
        n_kv: int,
        head_dim: int,
        page: int,
        draw: Draw,
        kv_dtype: KvDtype = "auto",
    ) -> Paged:
        widths = [-(-n // page) for n in contexts]
        n_blocks = sum(widths) + 3
        order = torch.randperm(n_blocks, generator=draw.generator).tolist()
        # The table has unused rows in between, and absurd numbers after the blocks of a sequence:
        # a kernel that reads either fails.
        tables = torch.full((2 * len(contexts) + 1, max(widths) + 2), 1 << 28, dtype=torch.int32)
        for i, width in enumerate(widths):
            tables[2 * i + 1, :width] = torch.tensor([order.pop() for _ in range(width)])
        rows = torch.arange(len(contexts), dtype=torch.int32) * 2 + 1
        cache = random_kv(draw, kv_dtype, n_blocks, 2, n_kv, page, head_dim)
        if kv_dtype == "auto":
            _poison(cache.numbers, tables[rows.long()], contexts, page)
        return cls(cache, tables.to(draw.device), rows.to(draw.device))


def _poison(numbers: torch.Tensor, tables: torch.Tensor, contexts: list[int], page: int) -> None:
    """Write NaN to every position that belongs to no sequence."""
    used = torch.zeros(len(numbers), page, dtype=torch.bool)
    for table, context in zip(tables, contexts, strict=True):
        at = torch.arange(context)
        used[table[at // page].long(), at % page] = True
    unused = ~used[:, None, None, :].expand(numbers.shape[:-1])
    numbers[unused.to(numbers.device)] = float("nan")


@dataclass(frozen=True)
class Draw:
    """Normal random numbers from a seed, on a device, in a dtype."""

    generator: torch.Generator
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Draw:
        return cls(torch.Generator().manual_seed(seed), dtype, device)

    def __call__(self, *shape: int) -> torch.Tensor:
        numbers = torch.randn(*shape, generator=self.generator)
        return numbers.to(device=self.device, dtype=self.dtype)


def random_kv(draw: Draw, kv_dtype: KvDtype, *shape: int) -> Kv:
    """Numbers over the range of the dtype, with a scale per vector in 8 bits."""
    wide = torch.randn(*shape, generator=draw.generator)
    if kv_dtype == "auto":
        return Kv(wide.to(draw.device, draw.dtype))
    scales = 0.002 + 0.02 * torch.rand(shape[:-1], generator=draw.generator)
    if kv_dtype == "int8":
        numbers = (40 * wide).round().clamp(-127, 127).to(torch.int8)
    else:
        numbers = (40 * wide).to(torch.float8_e4m3fn)
    return Kv(numbers.to(draw.device), scales.to(draw.device))


def assert_close(output: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal within the rounding of the dtype, as a share of the largest value."""
    assert output.shape == expected.shape
    assert torch.isfinite(output).all()
    error = (output.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= TOLERANCE[output.dtype], f"off by {error:.2g} of the largest value"


def check_norm(draw: Draw, n_rows: int, width: int, has_delta: bool) -> None:
    residual, weight = draw(n_rows, width), draw(width)
    delta = draw(n_rows, width) if has_delta else None
    wide = residual.double()
    expected = plain.add_rms_norm(
        wide, None if delta is None else delta.double(), weight.double(), 1e-5
    )
    output = kernels().add_rms_norm(residual, delta, weight, 1e-5)
    assert_close(output, expected)
    assert_close(residual, wide)


def check_silu(draw: Draw, n_rows: int, width: int) -> None:
    gate_up = draw(n_rows, 2 * width)
    assert_close(kernels().silu_mul(gate_up), plain.silu_mul(gate_up.double()))


def check_rope(
    draw: Draw,
    positions: list[int],
    n_q: int,
    n_kv: int,
    head_dim: int,
    page: int,
    has_norm: bool,
    kv_dtype: KvDtype = "auto",
) -> None:
    """Values in 8 bits may differ from the exact values by half a step of the format."""
    n = len(positions)
    config = ModelConfig(1, 64, n_q, n_kv, head_dim, 8, 8)
    rotary = rotary_tables(config, max(positions) + 1)
    rotary = (rotary[0].to(draw.device), rotary[1].to(draw.device))
    qkv = draw(n, (n_q + 2 * n_kv) * head_dim)
    n_blocks = n // page + 2
    cache = Kv.zeros((n_blocks, 2, n_kv, page, head_dim), draw.dtype, kv_dtype, qkv.device)
    order = torch.randperm(n_blocks * page, generator=draw.generator)[:n]
    slots = order.to(draw.device, torch.int32)
    at = torch.tensor(positions, dtype=torch.int32, device=draw.device)
    norm = draw(n_q + n_kv, head_dim) if has_norm else None
    wide = Kv(cache.numbers.double() * 0)
    expected = plain.rope_write(
        qkv.double(), at, slots, rotary, None if norm is None else norm.double(), 1e-6, wide
    )
    output = kernels().rope_write(qkv, at, slots, rotary, norm, 1e-6, cache)
    assert_close(output, expected)
    if cache.scales is None:
        assert_close(cache.numbers, wide.numbers)
        return
    value = cache.numbers.double() * cache.scales.double().unsqueeze(-1)
    largest = wide.numbers.abs().amax(-1, keepdim=True)
    off = (value - wide.numbers).abs()
    rounding = 1e-5 * largest  # of the kernel's float32 arithmetic
    if kv_dtype == "int8":
        assert (off <= largest / 127 / 2 + rounding).all(), "off by more than half of 1/127"
    else:
        # Four bits of mantissa with the hidden one; below 2⁻⁶ steps of 2⁻⁹ (448 is the largest).
        half_a_step = torch.maximum(wide.numbers.abs() / 16, largest / 448 * 2.0**-10)
        assert (off <= half_a_step + rounding).all(), "off by more than half a step of e4m3"


def check_decode(
    draw: Draw,
    contexts: list[int],
    n_kv: int,
    group: int,
    head_dim: int,
    page: int,
    n_programs: int,
    kv_dtype: KvDtype = "auto",
    tuning: Tuning = DEFAULT_TUNING,
) -> None:
    paged = Paged.make(contexts, n_kv, head_dim, page, draw, kv_dtype)
    q = draw(len(contexts), n_kv * group, head_dim)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=draw.device)
    work = planned(contexts, n_programs, draw.device)
    reads = (paged.cache, paged.tables, paged.rows, lengths, work)
    expected = plain.decode_attention(q.double(), *reads)
    output = kernels(tuning).decode_attention(q, *reads)
    assert_close(output, expected)


def check_chunk(
    draw: Draw,
    pieces: list[tuple[int, int]],
    n_kv: int,
    group: int,
    head_dim: int,
    page: int,
    kv_dtype: KvDtype = "auto",
    tuning: Tuning = DEFAULT_TUNING,
) -> None:
    """`pieces` are (start, n) of each sequence."""
    paged = Paged.make([start + n for start, n in pieces], n_kv, head_dim, page, draw, kv_dtype)
    prompt_pieces, first = [], 0
    for row, (start, n) in zip(paged.rows.tolist(), pieces, strict=True):
        prompt_pieces.append(PromptPiece(row, first, n, start))
        first += n
    q = draw(first, n_kv * group, head_dim)
    tiles = Tiles(
        torch.from_numpy(cut_tiles(prompt_pieces, group, tuning.chunk_rows)).to(draw.device)
    )
    whole = Tiles(torch.tensor(prompt_pieces, dtype=torch.int32))  # uncut: tiling must not matter
    expected = plain.chunk_attention(q.double(), paged.cache, paged.tables, whole)
    assert_close(kernels(tuning).chunk_attention(q, paged.cache, paged.tables, tiles), expected)


def check_fused(
    draw: Draw,
    contexts: list[int],
    pieces: list[tuple[int, int]],
    heads: tuple[int, int, int],
    n_programs: int,
    kv_dtype: KvDtype = "auto",
    tuning: Tuning = DEFAULT_TUNING,
) -> None:
    """`heads` are KV heads, query heads per KV head, and numbers per head. The fused kernel equals
    the two separate kernels, bit for bit in the interpreter, and is close to the twin."""
    n_kv, group, head_dim = heads
    n = len(contexts)
    ends = [start + n_tokens for start, n_tokens in pieces]
    paged = Paged.make([*contexts, *ends], n_kv, head_dim, 16, draw, kv_dtype)
    prompt_pieces, first = [], 0
    for row, (start, n_tokens) in zip(paged.rows[n:].tolist(), pieces, strict=True):
        prompt_pieces.append(PromptPiece(row, first, n_tokens, start))
        first += n_tokens
    q = draw(n + first, n_kv * group, head_dim)
    lengths = torch.tensor(contexts, dtype=torch.int32, device=draw.device)
    tiles = Tiles(
        torch.from_numpy(cut_tiles(prompt_pieces, group, tuning.chunk_rows)).to(draw.device)
    )
    reads = (paged.tables, paged.rows[:n], lengths, planned(contexts, n_programs, draw.device))
    output = kernels(tuning).fused_attention(q, paged.cache, *reads, tiles)
    decoded = kernels(tuning).decode_attention(q[:n], paged.cache, *reads)
    chunks = kernels(tuning).chunk_attention(q[n:], paged.cache, paged.tables, tiles)
    if draw.device == "cpu":
        assert torch.equal(output, torch.cat((decoded, chunks)))
    whole = Tiles(torch.tensor(prompt_pieces, dtype=torch.int32))
    assert_close(output, plain.fused_attention(q.double(), paged.cache, *reads, whole))


def check_sample(draw: Draw, n_rows: int, n_vocab: int) -> None:
    logits = draw(n_rows, n_vocab).float()
    logits[:, n_vocab // 2] = logits[:, n_vocab // 3]  # a tie, sometimes between the largest
    temperatures = torch.tensor([0.0, 0.7, 1.3] * n_rows, device=draw.device)[:n_rows]
    bits = torch.randint(-(2**31), 2**31, (n_rows, 2), generator=draw.generator)
    keys = bits.to(draw.device, torch.int32)
    expected = plain.sample(logits, temperatures, keys)
    assert kernels().sample(logits, temperatures, keys).tolist() == expected.tolist()


def check_frequencies(device: str, sample: Sample) -> None:
    """20 000 draws at T = 2 follow the softmax; χ² of 3 degrees of freedom, false alarm 1e-6."""
    n = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, 4.0], device=device).expand(n, 4).contiguous()
    generator = torch.Generator().manual_seed(3)
    keys = torch.randint(-(2**31), 2**31, (n, 2), generator=generator).to(device, torch.int32)
    drawn = sample(logits, torch.full((n,), 2.0, device=device), keys).cpu()
    expected = torch.softmax(torch.tensor([0.0, 0.5, 1.0, 2.0]), 0) * n
    counts = torch.bincount(drawn, minlength=4)
    assert float(((counts - expected) ** 2 / expected).sum()) < 30.7


CHECKS: dict[str, Any] = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
