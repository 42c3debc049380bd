"""What the engine refuses at once, instead of letting it wait."""

from __future__ import annotations

from loadgen.errors import SlobenchError
from reference_engine.state.kv import KvPool
from reference_engine.state.plan import Limits


class AdmissionError(SlobenchError):
    """A refused request; `code` is the OpenAI error code. Without `retry_after_s` it could not run
    even alone (a 400); with it, it may be tried again after so many seconds (a 429)."""

    def __init__(self, message: str, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


def check_admission(n_prompt: int, max_tokens: int, limits: Limits, kv: KvPool) -> None:
    """Raises AdmissionError for a request that would not fit an empty engine. Reads only what
    never changes, so any thread may ask."""
    if n_prompt + max_tokens > limits.max_model_len:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate make {n_prompt + max_tokens}; "
            f"the context here is {limits.max_model_len} tokens: shorten the prompt or max_tokens",
            "context_length_exceeded",
        )
    n_blocks = kv.blocks_for(n_prompt + max_tokens - 1)
    if n_blocks > kv.n_blocks:
        raise AdmissionError(
            f"{n_prompt} prompt tokens and {max_tokens} to generate need {n_blocks} KV blocks of "
            f"{kv.block_tokens} tokens; there are {kv.n_blocks}: start with more kv_blocks",
            "kv_capacity_exceeded",
        )
