"""A stand-in for Triton's driver, on machines without a GPU: kernels are compiled for an H100 and
their launches recorded, not executed. For tests and timings of what a launch costs on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget


class Launched(NamedTuple):
    """A launch: the kernel's name, the types and alignments that it was compiled for, the grid, and
    its arguments, of which tensors are addresses."""

    name: str
    signature: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


class StandInDriver:
    """Set by `triton.runtime.driver.set_active`. `launches` are recorded while `is_recording`."""

    def __init__(self) -> None:
        self.launches: list[Launched] = []
        self.n_launches = 0
        self.is_recording = False
        self.launcher_cls = lambda source, metadata: _Launcher(self, source, metadata)
        properties = {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: properties,
            load_binary=lambda name, kernel, shared, device: (1, 1, 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def activate(self) -> None:
        triton.runtime.driver.set_active(self)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Launcher:
    def __init__(self, driver: StandInDriver, source: Any, metadata: Any) -> None:
        self._driver, self._name = driver, metadata.name
        self._signature = f"{source.signature} {source.attrs} {metadata.num_warps}"

    def __call__(self, x: int, y: int, z: int, stream: int, function: int, *rest: Any) -> None:
        self._driver.n_launches += 1
        if self._driver.is_recording:
            arguments = rest[4:]  # after the metadata and the hooks
            plain = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
            self._driver.launches.append(Launched(self._name, self._signature, (x, y, z), plain))
