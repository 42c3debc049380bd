"""Where a device's work goes and how its end is known, and graphs of work that is done again and
again: CUDA's, or on the CPU the same work called again, so that all else can be tested there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

T = TypeVar("T")
Work = Callable[[], torch.Tensor]


class DeviceMemory(NamedTuple):
    """Bytes of a device: all, what other programs hold, and the most that this one did during a
    piece of work."""

    total: int
    others: int
    peak: int


class Lane(Protocol):
    """One device and its order of work."""

    device: torch.device
    gpu: str  # its UUID as NVML writes it, "" for none
    is_pinning: bool  # whether host memory is to be pinned for copies beside the computation
    n_processors: int

    def enter(self) -> None:
        """Make it the device of the calling thread, which is not the one that built it."""
        ...

    def mark(self) -> Callable[[], None]:
        """A function that returns once everything given to the device so far is done."""
        ...

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        """Work with fixed shapes and memory, as (do it again, where its result will be). What it
        reads and writes outside must stay where it is."""
        ...

    def room(self, work: Callable[[], None]) -> DeviceMemory | None:
        """Of the device's memory; `work` is done once to see what it takes, and keeps nothing.
        None where that cannot be told."""
        ...


class CpuLane:
    """Everything is done at once; a graph is its work done anew."""

    device = torch.device("cpu")
    gpu = ""
    is_pinning = False
    n_processors = 2

    def enter(self) -> None:
        """There is only one CPU."""

    def mark(self) -> Callable[[], None]:
        return _nothing

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        result = work()

        def again() -> None:
            result.copy_(work())

        return again, result

    def room(self, work: Callable[[], None]) -> DeviceMemory | None:
        return None


class CudaLane:
    """The current stream of a CUDA device; all graphs share one memory pool, as they never run at
    the same time, and one stream that they are captured on, as libraries keep a workspace for each
    (cuBLAS 32 MiB on Hopper). `cuda` is torch's module, or what stands in for it in a test."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self._cuda = device, cuda
        self.is_pinning = device.type == "cuda"
        properties = cuda.get_device_properties(device)
        self.gpu = f"GPU-{properties.uuid}"
        self.n_processors = int(properties.multi_processor_count)
        self.enter()
        self._pool, self._side = cuda.graph_pool_handle(), cuda.Stream(device)

    def enter(self) -> None:
        self._cuda.set_device(self.device)

    def mark(self) -> Callable[[], None]:
        event = self._cuda.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        # Once outside, on the side stream that capturing asks for: kernels are compiled and
        # libraries take their workspaces.
        cuda, side = self._cuda, self._side
        side.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(side):
            work()
        cuda.current_stream(self.device).wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, stream=side):
            result = work()
        return graph.replay, result

    def room(self, work: Callable[[], None]) -> DeviceMemory | None:
        cuda, device = self._cuda, self.device
        cuda.reset_peak_memory_stats(device)
        work()
        peak = int(cuda.max_memory_allocated(device))
        cuda.empty_cache()
        free, total = cuda.mem_get_info(device)
        return DeviceMemory(int(total), int(total - free - cuda.memory_reserved(device)), peak)


def _nothing() -> None:
    """There is nothing to wait for."""
