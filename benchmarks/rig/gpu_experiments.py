"""What is tried and not judged: attention in one launch, and KV in 8 bits."""

from __future__ import annotations

from typing import Any

import torch

from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Ops
from reference_engine.kernels.tiles import PromptPiece, Tiles, cut_tiles, splits_for
from reference_engine.state.model_config import KvDtype, ModelConfig
from rig.gpu_ceilings import Ceilings, Place, timed_s

PAGE = 16
KINDS: tuple[KvDtype, ...] = ("auto", "fp8", "int8")


def attention(ops: Ops, config: ModelConfig, place: Place, top: Ceilings) -> dict[str, Any]:
    """One layer of 32 decodes at 4096 and a piece of 512 after 2048, by what KV is kept in: the two
    launches one after the other and the one of both, and decoding as a share of the copy's
    bandwidth."""
    return {kind: _by_kind(ops, config, place, top, kind) for kind in KINDS}


def _by_kind(
    ops: Ops, config: ModelConfig, place: Place, top: Ceilings, kind: KvDtype
) -> dict[str, float]:
    n_rows, context = place.rows(32), 4096 // place.scale
    n_tokens, start = 512 // place.scale, 2048 // place.scale
    widths = [-(-context // PAGE)] * n_rows + [-(-(start + n_tokens) // PAGE)]
    n_blocks = sum(widths)
    tables = torch.zeros(n_rows + 1, max(widths), dtype=torch.int32)
    order = torch.randperm(n_blocks).to(torch.int32)
    for row, width in enumerate(widths):
        tables[row, :width], order = order[:width], order[width:]
    tables = tables.to(place.device)
    cache = _filled(config, place, n_blocks, kind)
    rows = torch.arange(n_rows, dtype=torch.int32, device=place.device)
    contexts = torch.full_like(rows, context)
    group = config.n_heads // config.n_kv_heads
    tiles = Tiles(
        torch.from_numpy(cut_tiles([PromptPiece(n_rows, 0, n_tokens, start)], group)).to(
            place.device
        )
    )
    shape = (n_rows + n_tokens, config.n_heads, config.head_dim)
    q = torch.randn(shape, device=place.device).to(place.dtype)
    n_splits = splits_for(n_rows, config.n_kv_heads, place.n_processors)

    def decode() -> torch.Tensor:
        return ops.decode_attention(q[:n_rows], cache, tables, rows, contexts, n_splits)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return decode(), ops.chunk_attention(q[n_rows:], cache, tables, tiles)

    def fused() -> torch.Tensor:
        return ops.fused_attention(q, cache, tables, rows, contexts, n_splits, tiles)

    decode_s = timed_s(decode, place)
    n_bytes = config.kv_bytes_per_token(place.dtype.itemsize, kind) / config.n_layers
    return {
        "decode_s": decode_s,
        "decode_share": n_rows * context * n_bytes / decode_s / top.copy_bytes_per_s,
        "two_launches_s": timed_s(both, place),
        "one_launch_s": timed_s(fused, place),
    }


def _filled(config: ModelConfig, place: Place, n_blocks: int, kind: KvDtype) -> Kv:
    shape = (n_blocks, 2, config.n_kv_heads, PAGE, config.head_dim)
    kv = Kv.zeros(shape, place.dtype, kind, torch.device(place.device))
    if kv.scales is None:
        kv.numbers.copy_(torch.randn(shape, device=place.device))
    else:
        kv.scales.fill_(0.02)
        # As bits: below 0x70 every pattern is a finite number of both formats.
        kv.parts()[0].copy_(torch.randint(0, 0x70, shape, device=place.device))
    return kv
