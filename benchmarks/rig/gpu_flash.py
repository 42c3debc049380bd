"""Torch's own FlashAttention beside the chunk kernel: it reads no pages, so that KV is gathered
first."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from reference_engine.kernels.kv_memory import Kv
from rig.gpu_ceilings import Place

OFF = 0.03  # of the largest number: bfloat16 in another order of sums


def gathered_flash(
    q: torch.Tensor, cache: Kv, table: torch.Tensor, start: int, place: Place
) -> Callable[[], torch.Tensor]:
    """Attention of one piece of a prompt, `q` [n, Hq, hd] at positions `start` …, over the blocks
    of `table` [width]: what an engine would do in each layer, one copy and one launch. Which
    vectors are copied is found once, as it would be in a step. On a CPU torch's SDPA stands in."""
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
        return flash(q, k, v, ends) if place.is_gpu else _sdpa(q, k, v, start)

    return attend


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[torch.Tensor]
) -> torch.Tensor:
    """Causal, the last query at the last key. What `torch.nn.attention.varlen` calls, which hides
    in torch 2.11 that it takes fewer KV heads; `ends` are those of queries and keys, [2] each."""
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, *ends, len(q), len(k), 0.0, True, False
    )[0]
    return out


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> torch.Tensor:
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril_(start)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)


def refuse_another_answer(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises RuntimeError where they are further apart than rounding: a time of something else
    says nothing."""
    off = float((found - expected).abs().max() / expected.abs().max())
    if not off <= OFF:
        raise RuntimeError(f"its answer is off by {off:.3g} of the largest number")
