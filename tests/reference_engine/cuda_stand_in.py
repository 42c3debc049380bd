"""A stand-in for `torch.cuda` on machines without a GPU: it computes nothing and records the order
of calls. Its graphs do nothing when they are replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

GIB = 1 << 30


class StandIn:
    """A GPU of 8 GiB: other programs hold 1, this program 3, and its largest step took 2."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.CUDAGraph = lambda: SimpleNamespace(replay=lambda: self.calls.append("replay"))
        self.Event = lambda: SimpleNamespace(
            record=lambda: self.calls.append("record"),
            synchronize=lambda: self.calls.append("synchronize"),
        )

    def Stream(self, device):
        self.calls.append("a stream")
        return SimpleNamespace(name="side", wait_stream=lambda other: self._wait("side", other))

    def current_stream(self, device):
        return SimpleNamespace(name="own", wait_stream=lambda other: self._wait("own", other))

    @contextmanager
    def stream(self, stream) -> Iterator[None]:
        self.calls.append(f"on {stream.name}")
        yield
        self.calls.append(f"off {stream.name}")

    @contextmanager
    def graph(self, graph, pool=None, stream=None) -> Iterator[None]:
        where = "" if stream is None else f" on {stream.name}"
        self.calls.append(f"capture into {pool}{where}")
        yield
        self.calls.append("captured")

    def get_device_properties(self, device):
        return SimpleNamespace(
            name="NVIDIA H200", uuid="4f5e", multi_processor_count=132, total_memory=8 * GIB
        )

    def set_device(self, device) -> None:
        self.calls.append(f"enter {device}")

    def graph_pool_handle(self) -> str:
        return "pool"

    def synchronize(self) -> None:
        pass

    def empty_cache(self) -> None:
        self.calls.append("empty the cache")

    def reset_peak_memory_stats(self, device) -> None:
        self.calls.append("reset the peak")

    def max_memory_allocated(self, device) -> int:
        self.calls.append("peak")
        return 2 * GIB

    def mem_get_info(self, device) -> tuple[int, int]:
        return 4 * GIB, 8 * GIB

    def memory_allocated(self) -> int:
        return 0

    def memory_reserved(self, device) -> int:
        return 3 * GIB

    def _wait(self, name, other) -> None:
        self.calls.append(f"{name} waits for {other.name}")
