"""Copies of KV blocks to host memory and back, in order and without a wait; and the KV blocks that
fit into a GPU."""

from __future__ import annotations

import pytest

from loadgen.errors import UsageError
from reference_engine.executors.base import Site
from reference_engine.model.zoo import resolve
from reference_engine.state.batch import Copy, StepBatch
from tests.reference_engine.cuda_stand_in import StandIn

torch = pytest.importorskip("torch", reason="torch is not installed")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402 - only with torch

from reference_engine.executors.cuda_stream import CudaStream  # noqa: E402
from reference_engine.executors.torch_cuda import TorchCuda  # noqa: E402
from reference_engine.executors.torch_memory import HostKv, blocks_that_fit  # noqa: E402
from reference_engine.kernels.kv_memory import Kv  # noqa: E402
from reference_engine.kernels.ops import PLAIN  # noqa: E402
from reference_engine.model.paged import PagedLlama  # noqa: E402
from reference_engine.model.weights import random_weights  # noqa: E402

ATEN = torch.ops.aten
CPU = torch.device("cpu")
# Block 1 is copied out, then 2; both return in each other's place, and block 1 is copied out again.
COPIES = (
    Copy(1, 0, True), Copy(2, 3, True), Copy(1, 3, False), Copy(2, 0, False), Copy(1, 1, True)
)  # fmt: skip


class RecordedCopies(TorchDispatchMode):
    """Records copies between two devices, without making them: whether each is non-blocking."""

    def __init__(self) -> None:
        super().__init__()
        self.non_blocking: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is ATEN.copy_.default and args[0].device != args[1].device:
            self.non_blocking.append(bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking"))
            return args[0]
        if func is ATEN._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            self.non_blocking.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def numbered(device) -> Kv:
    """Block b of layer l holds 10·l + b."""
    layers, blocks = torch.arange(2.0).view(2, 1), torch.arange(4.0).view(1, 4)
    return Kv((10 * layers + blocks).view(2, 4, 1, 1, 1, 1).expand(2, 4, 2, 1, 2, 3).to(device))


def test_blocks_are_copied_in_order():
    cache = Kv(numbered("cpu").numbers.clone())
    HostKv(cache, 4, is_pinned=False).copy_blocks(COPIES, cache)
    assert cache.numbers[:, :, 0, 0, 0, 0].tolist() == [[0, 2, 1, 3], [10, 12, 11, 13]]


def test_no_copy_waits_for_the_device():
    """On a device without content, where a wait is not possible either."""
    cache = numbered("meta")
    host = HostKv(cache, 4, is_pinned=False)
    with RecordedCopies() as copies:
        host.copy_blocks(COPIES, cache)
    assert len(copies.non_blocking) == 1 + len(COPIES)  # block numbers are sent in a single copy
    assert all(copies.non_blocking)


def test_a_step_of_copies_alone_is_waited_for():
    """Their block numbers are in memory that the next step overwrites."""
    stream = CudaStream(CPU, StandIn())
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 64)
    site = Site(resolve("nano"), 4, 16, 64, lambda s: None, 4, 1)
    executor = TorchCuda(model, PLAIN, site, 4, stream, has_graphs=False)
    stream._cuda.calls.clear()
    assert executor.execute(StepBatch(copies=COPIES)).tokens == []
    assert stream._cuda.calls == ["enter cpu", "record", "synchronize"]


def test_kv_gets_the_rest_of_the_memory_share():
    # 140 GB · 0.9 = 126 GB, less 16 + 4 + 2 GB: 104 GB of 2 MB blocks.
    assert blocks_that_fit(140 * 10**9, 20 * 10**9, 0.9, 2 * 10**9, 2 * 10**6) == 52_000


def test_no_memory_for_kv_is_an_error_with_the_sizes():
    with pytest.raises(UsageError, match=r"0\.5 of 24\.0 GB .* 16\.0 GB of weights"):
        blocks_that_fit(24 * 10**9, 16 * 10**9, 0.5, 2 * 10**9, 2 * 10**6)
