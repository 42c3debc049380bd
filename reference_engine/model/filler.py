"""Rows that compute something for nobody, so that padding takes the time it takes."""

from __future__ import annotations

from reference_engine.cost_model import Padding
from reference_engine.executors.base import Row
from reference_engine.sequence import Request

_PIECE = 512


def padding_rows(
    padding: Padding, scratch_block: int, block_tokens: int, max_model_len: int
) -> list[Row]:
    """Rows as large as the padding: prompts of at most 512 tokens, and decodes that share the
    context they read evenly. All they write goes to one scratch block, and none of
    them wants a token.
    """
    rows: list[Row] = []
    left = padding.prefill_tokens
    while left > 0:
        n_tokens = min(left, max_model_len, _PIECE)
        rows.append(_row(0, n_tokens, scratch_block, block_tokens))
        left -= n_tokens
    if padding.decode_rows:
        context = padding.decode_context_tokens // padding.decode_rows
        start = min(max(context, 1), max_model_len - 1)
        rows += [_row(start, 1, scratch_block, block_tokens)] * padding.decode_rows
    return rows


def _row(start: int, n_tokens: int, block: int, block_tokens: int) -> Row:
    length = start + n_tokens
    filler = Request(id="padding", tokens=[0] * length, max_tokens=1, arrived_s=0.0)
    filler.blocks = [block] * -(-length // block_tokens)
    return Row(filler, start, n_tokens, False)
