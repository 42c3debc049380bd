"""Rows that compute padding: they take its time, and their results are discarded."""

from __future__ import annotations

from reference_engine.state.batch import Row
from reference_engine.state.cost_model import Padding
from reference_engine.state.sequence import Request

_PIECE_TOKENS = 512


def padding_rows(
    padding: Padding, scratch_block: int, block_tokens: int, max_model_len: int
) -> list[Row]:
    """Rows as large as the padding: prompts of at most 512 tokens, and decodes that divide
    `padding.decode_context_tokens` evenly. They write to the scratch block, which comes after
    the last block of the pool, and sample no token.

    Each decode reads other blocks, whichever requests own them. A block shared by all of them would
    stay in the processor's cache, and padding would cost less than the rows it stands for.
    """
    rows: list[Row] = []
    for n_tokens in filler_pieces(padding, max_model_len):
        n_blocks = -(-n_tokens // block_tokens)
        rows.append(_row([0] * n_tokens, 0, [scratch_block] * n_blocks))
    if padding.decode_rows:
        start = filler_start(padding, max_model_len)
        n_read, tokens = start // block_tokens, [0] * (start + 1)
        for i in range(padding.decode_rows):
            blocks = [(i * n_read + k) % scratch_block for k in range(n_read)]
            rows.append(_row(tokens, start, [*blocks, scratch_block]))
    return rows


def filler_pieces(padding: Padding, max_model_len: int) -> list[int]:
    """Tokens of each prompt of padding."""
    size = min(max_model_len, _PIECE_TOKENS)
    whole, rest = divmod(padding.prefill_tokens, size)
    return [size] * whole + [rest] * (rest > 0)


def filler_start(padding: Padding, max_model_len: int) -> int:
    """The position that each decode of padding computes."""
    context = padding.decode_context_tokens // max(padding.decode_rows, 1)
    return min(max(context, 1), max_model_len - 1)


def _row(tokens: list[int], start: int, blocks: list[int]) -> Row:
    filler = Request(id="padding", tokens=tokens, max_tokens=1, arrived_s=0.0, blocks=blocks)
    return Row(filler, start, len(tokens) - start, False)
