"""A device and its stream of work: when the work is done, its memory, and graphs of repeated work.

Graphs are CUDA's; on the CPU a graph calls the captured function again, so that everything around
CUDA's own calls can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch

Work = Callable[[], torch.Tensor]


class DeviceMemory(NamedTuple):
    """Bytes of a device: all, those that other programs hold, and the most that this program held
    during a piece of work."""

    total: int
    others: int
    peak: int


class DeviceStream(Protocol):
    """A device and the order of the work on it."""

    device: torch.device
    gpu: str  # its NVML UUID, "" for a CPU
    gpu_name: str  # "NVIDIA H100 80GB HBM3", "" for a CPU
    is_pinning: bool  # whether host memory is pinned, so that copies overlap with computation
    n_processors: int

    def enter(self) -> None:
        """Make it the device of the calling thread, which may not be the thread that built it."""
        ...

    def record(self) -> Callable[[], None]:
        """A function that returns when all work given to the device so far is done."""
        ...

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        """A graph of `work`, as (function that replays it, tensor of its result). The shapes and
        the addresses of all memory that `work` reads and writes must stay the same."""
        ...

    def memory_during(self, work: Callable[[], None]) -> DeviceMemory | None:
        """Run `work`, which must keep no memory, and measure. None where it cannot be measured."""
        ...


class CpuStream:
    """The CPU: all work is done when its call returns."""

    device = torch.device("cpu")
    gpu = gpu_name = ""
    is_pinning = False
    n_processors = 2

    def enter(self) -> None:
        pass

    def record(self) -> Callable[[], None]:
        return lambda: None

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        result = work()

        def replay() -> None:
            result.copy_(work())

        return replay, result

    def memory_during(self, work: Callable[[], None]) -> DeviceMemory | None:
        return None


class CudaStream:
    """The current stream of a CUDA device. `cuda` is torch's module, or a stand-in in a test.

    All graphs share a memory pool, as they never run at the same time. The stream that they are
    captured on is the same for all of the process: libraries keep a workspace for each stream until
    the process ends (cuBLAS 32 MiB on Hopper).
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device, self._cuda = device, cuda
        self.is_pinning = device.type == "cuda"
        properties = cuda.get_device_properties(device)
        self.gpu, self.gpu_name = f"GPU-{properties.uuid}", str(properties.name)
        self.n_processors = int(properties.multi_processor_count)
        self.enter()
        self._pool, self._side = cuda.graph_pool_handle(), _side_stream(cuda, device)

    def enter(self) -> None:
        self._cuda.set_device(self.device)

    def record(self) -> Callable[[], None]:
        event = self._cuda.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def capture(self, work: Work) -> tuple[Callable[[], None], torch.Tensor]:
        # A trial before the capture, on the side stream that a capture needs: it compiles kernels
        # and lets libraries allocate their workspaces, neither of which can be captured.
        cuda, side = self._cuda, self._side
        side.wait_stream(cuda.current_stream(self.device))
        with cuda.stream(side):
            work()
        cuda.current_stream(self.device).wait_stream(side)
        graph = cuda.CUDAGraph()
        with cuda.graph(graph, pool=self._pool, stream=side):
            result = work()
        return graph.replay, result

    def memory_during(self, work: Callable[[], None]) -> DeviceMemory | None:
        cuda, device = self._cuda, self.device
        cuda.reset_peak_memory_stats(device)
        work()
        peak = int(cuda.max_memory_allocated(device))
        cuda.empty_cache()
        free, total = cuda.mem_get_info(device)
        return DeviceMemory(int(total), int(total - free - cuda.memory_reserved(device)), peak)


@cache
def _side_stream(cuda: Any, device: torch.device) -> Any:
    return cuda.Stream(device)
