"""What both attentions do for a number of keys: scores, softmax so far, values mixed so far.

Source: online softmax of FlashAttention-2 (arXiv 2307.08691), Algorithm 1; block tables of
PagedAttention (SOSP'23).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turn(
    query,
    cache,
    table,
    head,
    at,
    inside,
    is_seen,
    d,
    scale,
    peak,
    total,
    mixed,
    N_KV: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
):
    """The keys at positions `at` of a sequence, those `inside` of what it may read; `is_seen`
    [ROWS or 1, KEYS] is what a row may look at. Returns the new `peak` [ROWS] (of the scores, in
    units of log 2), `total` [ROWS] and `mixed` [ROWS, HEAD], both relative to it."""
    page = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64)
    base = ((page * 2 * N_KV + head) * PAGE + at % PAGE) * HEAD
    k = tl.load(cache + base[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    score = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    score = tl.where(is_seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    v_base = base + N_KV * PAGE * HEAD
    v = tl.load(cache + v_base[:, None] + d[None, :], mask=inside[:, None], other=0.0)
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(v.dtype), v, input_precision="ieee")
    return higher, total * shrink + tl.sum(weight, 1), mixed
