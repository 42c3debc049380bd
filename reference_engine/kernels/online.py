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
    scales,
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
    IS_SCALED: tl.constexpr,
):
    """The keys at positions `at` of a sequence, those `inside` of what it may read; `is_seen`
    [ROWS or 1, KEYS] is what a row may look at. Returns the new `peak` [ROWS] (of the scores, in
    units of log 2), `total` [ROWS] and `mixed` [ROWS, HEAD], both relative to it."""
    page = tl.load(table + at // PAGE, mask=inside, other=0).to(tl.int64)
    vector = (page * 2 * N_KV + head) * PAGE + at % PAGE
    k = tl.load(cache + vector[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0)
    score = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee") * scale
    if IS_SCALED:  # a vector's scale is taken out of its product: the matrices stay 8 bits wide
        score *= tl.load(scales + vector, mask=inside, other=0.0)[None, :]
    score = tl.where(is_seen, score, float("-inf"))
    higher = tl.maximum(peak, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weight, 1)
    vector += N_KV * PAGE
    v = tl.load(cache + vector[:, None] * HEAD + d[None, :], mask=inside[:, None], other=0.0)
    if IS_SCALED:
        weight *= tl.load(scales + vector, mask=inside, other=0.0)[None, :]
    mixed = mixed * shrink[:, None]
    mixed += tl.dot(weight.to(query.dtype), v.to(query.dtype), input_precision="ieee")
    return higher, total, mixed
