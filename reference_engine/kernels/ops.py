"""Operations of the paged model as a value: Triton's kernels, or their twins in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import Tensor

from loadgen.errors import MissingDependency
from reference_engine.kernels import plain
from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.tiles import DEFAULT_TUNING, DecodeWork, Tiles, Tuning

Kernels = Literal["triton", "plain"]
AddRmsNorm = Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
SiluMul = Callable[[Tensor], Tensor]
RopeWrite = Callable[
    [Tensor, Tensor, Tensor, tuple[Tensor, Tensor], Tensor | None, float, Kv], Tensor
]
DecodeAttention = Callable[[Tensor, Kv, Tensor, Tensor, Tensor, DecodeWork], Tensor]
ChunkAttention = Callable[[Tensor, Kv, Tensor, Tiles], Tensor]
FusedAttention = Callable[[Tensor, Kv, Tensor, Tensor, Tensor, DecodeWork, Tiles], Tensor]
Sample = Callable[[Tensor, Tensor, Tensor], Tensor]


class Ops(NamedTuple):
    """A function per operation. Those of `plain` define the arguments and the results."""

    add_rms_norm: AddRmsNorm
    silu_mul: SiluMul
    rope_write: RopeWrite
    decode_attention: DecodeAttention
    chunk_attention: ChunkAttention
    fused_attention: FusedAttention
    sample: Sample


PLAIN = Ops(
    plain.add_rms_norm,
    plain.silu_mul,
    plain.rope_write,
    plain.decode_attention,
    plain.chunk_attention,
    plain.fused_attention,
    plain.sample,
)


def ops(kernels: Kernels, tuning: Tuning = DEFAULT_TUNING, *, is_cached: bool = True) -> Ops:
    """The operations by name; `plain` ignores the rest. `is_cached` launches compiled kernels
    directly (`launching`). Raises MissingDependency for `triton` if it is not installed."""
    if kernels == "plain":
        return PLAIN
    try:
        from reference_engine.kernels import (
            launching,
            paged_attention,
            pointwise,
            rope,
            token_sampling,
        )
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise MissingDependency(
            "kernels=triton needs triton: pip install triton (or use kernels=plain, which is slow)"
        ) from error
    launch: launching.Launch = launching.launch_by_triton
    if is_cached and not launching.is_interpreting():
        launch = launching.CACHED
    functions: tuple[Any, ...] = (
        partial(pointwise.add_rms_norm, launch=launch),
        partial(pointwise.silu_mul, launch=launch),
        partial(rope.rope_write, launch=launch),
        partial(paged_attention.decode_attention, tuning=tuning, launch=launch),
        partial(paged_attention.chunk_attention, tuning=tuning, launch=launch),
        partial(paged_attention.fused_attention, tuning=tuning, launch=launch),
        partial(token_sampling.sample, launch=launch),
    )
    return Ops(*functions)
