"""Memory for KV blocks, and who asked for too much of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from loadgen.errors import UsageError


@contextmanager
def asked_for(
    option: str, n_blocks: int, block_bytes: int, refusal: type[Exception] = MemoryError
) -> Iterator[None]:
    """Around taking memory for blocks. Raises UsageError, naming the option and what the refusal
    said, where there is too little; torch refuses with a RuntimeError."""
    try:
        yield
    except refusal as error:
        said = str(error).partition("\n")[0]
        raise UsageError(
            f"{option}: {n_blocks} blocks need {n_blocks * block_bytes / 1e9:.1f} GB of memory, "
            f"which is refused: {said}"
        ) from error
