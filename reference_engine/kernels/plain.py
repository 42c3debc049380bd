"""Twins of the kernels: the same operations in plain torch, on any device.

The engine uses them without Triton, and the tests use them as the oracle of the kernels: with
float64 tensors they compute in float64. Shapes: T flat token positions, S sequences, Hq query and
Hkv KV heads of `hd` numbers; the paged KV memory of a layer is a `Kv`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from reference_engine.kernels.kv_memory import SMALLEST, Kv, indexable
from reference_engine.kernels.tiles import DecodeWork, Tiles

_LOW = 0xFFFF_FFFF


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add `delta` to `residual` [T, d] in place; return its RMS norm times `weight` [d].

    Source: Zhang, Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467).
    """
    if delta is not None:
        residual.add_(delta)
    return _rms(residual, weight, eps)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up, [T, ffn], of `gate_up` [T, 2·ffn], which holds gate before up in each row."""
    gate, up = gate_up.chunk(2, -1)
    wide = _wide(gate)
    return (wide * torch.sigmoid(wide) * _wide(up)).to(gate_up.dtype)


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
    qk_norm: torch.Tensor | None,
    eps: float,
    cache: Kv,
) -> torch.Tensor:
    """Split `qkv` [T, (Hq + 2·Hkv)·hd], normalise (`qk_norm` [Hq + Hkv, hd]) and rotate queries and
    keys, and write keys and values to `cache` at `slots` [T] = block · block_tokens + offset.
    Returns the queries [T, Hq, hd]. `rotary` is the result of `model.llama.rotary_tables`."""
    _, _, n_kv, block_tokens, head_dim = cache.numbers.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    n_q = heads.shape[1] - 2 * n_kv
    qk = _wide(heads[:, : n_q + n_kv])  # [T, Hq + Hkv, hd]
    if qk_norm is not None:
        qk = _rms(qk, qk_norm, eps)
    at = positions.long()
    cos, sin = (table[at].unsqueeze(1).to(qk.dtype) for table in rotary)
    qk = qk * cos + qk.roll(head_dim // 2, -1) * sin
    kv = torch.stack((qk[:, n_q:], _wide(heads[:, n_q + n_kv :])), 1)  # [T, 2, Hkv, hd]
    block, offset = slots.long() // block_tokens, slots.long() % block_tokens
    if cache.scales is not None:
        # From the wide numbers: rounded twice, a value could be off by more than half a step.
        scales = kv.abs().amax(-1).clamp_min(SMALLEST) / cache.largest
        cache.scales[block, :, :, offset] = scales.to(cache.scales.dtype)
        kv = kv / scales.unsqueeze(-1)
        kv = (kv + 0.5).floor() if cache.numbers.dtype == torch.int8 else kv
    indexable(cache.numbers)[block, :, :, offset] = indexable(kv.to(cache.numbers.dtype))
    return qk[:, :n_q].to(qkv.dtype).contiguous()


def decode_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    work: DecodeWork,
) -> torch.Tensor:
    """Softmax(q·kᵀ/√hd)·v, [S, Hq, hd], for a single position of each sequence.

    Sequence i attends to the first `contexts[i]` ≥ 1 tokens of the blocks in `tables[rows[i]]`.
    `work` is the division of these contexts in the kernel; it changes rounding only, and has no
    effect here.
    """
    out = torch.empty_like(q)
    for i, (row, n_context) in enumerate(zip(rows.tolist(), contexts.tolist(), strict=True)):
        out[i] = _attend(q[i : i + 1], cache, tables[row], n_context - 1)[0]
    return out


def chunk_attention(q: torch.Tensor, cache: Kv, tables: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Causal attention of pieces of prompts, [T, Hq, hd]. KV of the pieces is already in `cache`;
    `tiles` assigns the positions to sequences."""
    out = torch.empty_like(q)
    for row, first, n, start in tiles.table.tolist():
        out[first : first + n] = _attend(q[first : first + n], cache, tables[row], start)
    return out


def fused_attention(
    q: torch.Tensor,
    cache: Kv,
    tables: torch.Tensor,
    rows: torch.Tensor,
    contexts: torch.Tensor,
    work: DecodeWork,
    tiles: Tiles,
) -> torch.Tensor:
    """Both at once, [T, Hq, hd]: the first positions of `q` decode, in the order of `rows`; `tiles`
    count the positions after them from 0."""
    n = len(rows)
    decoded = decode_attention(q[:n], cache, tables, rows, contexts, work)
    return torch.cat((decoded, chunk_attention(q[n:], cache, tables, tiles)))


def sample(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A token per row of `logits` [S, V], int64 [S].

    At temperature 0 it is the largest logit, else the largest logit/temperature + Gumbel noise,
    which is a draw from their softmax. The noise of token v is a hash of v and the row's `keys`
    [S, 2] (int32, any bits), so that a draw depends on nothing else in the batch. The first of
    equal values wins. Inverse transform sampling, as on the CPU, would need a sort, which for
    150 000 logits per row takes longer than a decode step of a small model.

    Source: Gumbel-max trick (Maddison et al., arXiv 1411.0030, §2); murmur3's finaliser.
    """
    hot = temperatures > 0
    scaled = logits.float() / torch.where(hot, temperatures, 1.0).unsqueeze(1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    low, high = (keys.long() & _LOW).unsqueeze(-1).unbind(1)
    bits = _hash_bits((_hash_bits(ids ^ low) + high) & _LOW)
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23  # in (0, 1), so that both logs are finite
    noise = -torch.log(-torch.log(uniform))
    return torch.where(hot.unsqueeze(1), scaled + noise, scaled).argmax(-1)


def _attend(q: torch.Tensor, cache: Kv, table: torch.Tensor, start: int) -> torch.Tensor:
    """Causal attention of queries [n, Hq, hd] at positions `start …` of a sequence."""
    n, n_q, head_dim = q.shape
    n_kv, block_tokens = cache.numbers.shape[2:4]
    n_context = start + n
    pages = _read(cache, table[: -(-n_context // block_tokens)].long(), _wide(q).dtype)
    kv = pages.permute(1, 2, 0, 3, 4).reshape(2, n_kv, -1, head_dim)[:, :, :n_context]
    k, v = kv.repeat_interleave(n_q // n_kv, 1).unbind(0)  # [Hq, C, hd]
    scores = _wide(q).transpose(0, 1) @ k.transpose(1, 2) / head_dim**0.5
    if n > 1:
        hidden = torch.ones(n, n_context, dtype=torch.bool, device=q.device).triu_(start + 1)
        scores.masked_fill_(hidden, float("-inf"))
    return (F.softmax(scores, -1) @ v).transpose(0, 1).to(q.dtype)


def _read(cache: Kv, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Dequantised K and V of P blocks, [P, 2, Hkv, block, hd]."""
    numbers: torch.Tensor = indexable(cache.numbers)[blocks].view(cache.numbers.dtype).to(dtype)
    if cache.scales is not None:
        numbers *= cache.scales[blocks].to(dtype).unsqueeze(-1)
    return numbers


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = _wide(x)
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * weight).to(x.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, in which the kernels compute, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def _hash_bits(x: torch.Tensor) -> torch.Tensor:
    """murmur3's finaliser. Products of 32-bit numbers may overflow int64; their low half, which is
    kept, is right all the same."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return x ^ (x >> 16)
