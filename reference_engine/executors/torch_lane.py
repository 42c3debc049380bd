"""Where a device's work goes and how its end is known, and graphs of work that is done again and
again: CUDA's, or on the CPU the same work called again, so that all else can be tested there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

T = TypeVar("T")
Work = Callable[[], torch.Tensor]


class Lane(Protocol):
    """One device and its order of work."""

    device: torch.device
    gpu: str  # its UUID as NVML writes it, "" for none
    is_pinning: bool  # whether host memory is to be pinned for copies beside the computation

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


class CpuLane:
    """Everything is done at once; a graph is its work done anew."""

    device = torch.device("cpu")
    gpu = ""
    is_pinning = False

    def enter(self) -> None:
        """There is only one CPU."""

    def mark(self) -> Callable[[], None]:
        return _nothing

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        result = work()

        def again() -> None:
            result.copy_(work())

        return again, result


class CudaLane:
    """The current stream of a CUDA device; all graphs share one memory pool, as they never run at
    the same time."""

    is_pinning = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self.enter()
        self._pool = torch.cuda.graph_pool_handle()

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        # Once outside, on the side stream that capturing asks for: kernels are compiled and
        # libraries take their workspaces.
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return graph.replay, result


def _nothing() -> None:
    """There is nothing to wait for."""
