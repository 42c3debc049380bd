"""Launches of Triton kernels with little work on the host.

Triton's own launch finds the compiled kernel by the types, alignments and values of all arguments,
which takes longer than most kernels of a layer. `CachedLaunches` finds it by a short key and gives
the addresses to the compiled kernel. It relies on `CompiledKernel.run`, `function` and
`packed_metadata`, which Triton's own launch uses in 3.6 to 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import triton
from torch import Tensor
from triton.runtime import driver

_ALIGNMENT = 16  # bytes; kernels are compiled for addresses that are multiples of it


class Launch(Protocol):
    """Starts a kernel on `grid`, on the current stream. Its arguments are `tensors`, `numbers`, and
    `constants` in the order of its signature."""

    def __call__(
        self,
        kernel: Any,
        grid: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
        *,
        warps: int = 4,
        stages: int = 3,
        **constants: Any,
    ) -> None: ...


def launch_by_triton(
    kernel: Any,
    grid: Sequence[int],
    tensors: Sequence[Tensor],
    numbers: Sequence[float] = (),
    *,
    warps: int = 4,
    stages: int = 3,
    **constants: Any,
) -> Any:
    """By Triton's own launch; also in its interpreter. Returns the compiled kernel."""
    return kernel[grid](*tensors, *numbers, num_warps=warps, num_stages=stages, **constants)


class CachedLaunches:
    """Launches that remember compiled kernels. The first of its kind, and those with an address
    that is no multiple of 16 bytes, are left to Triton."""

    def __init__(self) -> None:
        self._starts: dict[Hashable, Callable[..., None]] = {}

    def __call__(
        self,
        kernel: Any,
        grid: Sequence[int],
        tensors: Sequence[Tensor],
        numbers: Sequence[float] = (),
        *,
        warps: int = 4,
        stages: int = 3,
        **constants: Any,
    ) -> None:
        active = driver.active
        device = active.get_current_device()
        addresses = [tensor.data_ptr() for tensor in tensors]
        any_bits = 0
        for address in addresses:
            any_bits |= address
        values = constants.values()
        # Kernels are found by identity: they are functions of a module and never freed.
        key = (
            id(kernel),
            device,
            any_bits % _ALIGNMENT,
            warps,
            stages,
            *numbers,
            *values,
            *[tensor.dtype for tensor in tensors],
        )
        start = self._starts.get(key)
        if start is None:
            compiled = launch_by_triton(
                kernel, grid, tensors, numbers, warps=warps, stages=stages, **constants
            )
            if not any_bits % _ALIGNMENT:
                self._starts[key] = _start_of(kernel, compiled, list(constants))
            return
        stream = active.get_current_stream(device)
        start(*grid, *_ONES[len(grid)], stream, *addresses, *numbers, *values)


CACHED = CachedLaunches()
"""Of the process: compiled kernels do not depend on the model or on the engine."""

_ONES: tuple[tuple[int, ...], ...] = ((1, 1, 1), (1, 1), (1,), ())
"""The sizes that a grid of so many dimensions lacks."""


def _start_of(kernel: Any, compiled: Any, constants: list[str]) -> Callable[..., None]:
    """A function of (grid x, y, z, stream, *arguments)."""
    names = kernel.arg_names[len(kernel.arg_names) - len(constants) :]
    assert names == constants, f"{kernel}: the constants are {names}, not {constants}"
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(x: int, y: int, z: int, stream: int, *arguments: float) -> None:
        run(x, y, z, stream, function, metadata, None, None, None, *arguments)

    return start


def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), which compiles nothing."""
    return bool(triton.knobs.runtime.interpret)
