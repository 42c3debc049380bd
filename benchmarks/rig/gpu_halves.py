"""A GPU in two halves, one that waits for memory beside one that multiplies: what decoding and
prompts would get of it if each had multiprocessors of its own. Tried, not judged."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rig.gpu_ceilings import Place

SHARES = (0.25, 0.5, 0.75)
_GRANULE = 8  # multiprocessors that a part of an H100 or H200 is made of


@dataclass(frozen=True)
class Half:
    """A stream whose kernels run on multiprocessors that no other half has."""

    processors: int
    stream: Any


@dataclass(frozen=True)
class Load:
    """Work of one kind in a stream; `amount` is what one piece of it moves or computes."""

    work: Callable[[], object]
    amount: float
    stream: Any

    def launch(self, cuda: Any, n: int) -> None:
        with cuda.stream(self.stream):
            for _ in range(n):
                self.work()


Split = Callable[[int], tuple[Half, Half]]


def parts_of_a_gpu(place: Place, split: Split) -> list[dict[str, Any]] | str:
    """The rates of a copy and a multiplication that run at the same time: on the whole GPU, then
    with a share of it for the copy and the rest for the other. `together` adds up both as shares
    of what each has alone on the whole GPU: 1 is what taking turns would give. Why not, where it
    cannot be tried."""
    if place.cuda is None:
        return "not run: there is no GPU"
    counts = [max(_GRANULE, int(place.n_processors * s) // _GRANULE * _GRANULE) for s in SHARES]
    try:
        pairs = [split(n) for n in counts]
    except (ImportError, RuntimeError) as error:
        return f"not run: {error}"
    copy, multiply = _works(place)
    streams = (place.cuda.Stream(device=place.device) for _ in range(2))
    whole = [Half(place.n_processors, stream) for stream in streams]
    alone = _rates(place, whole, copy, multiply)
    found = [alone | _together(alone, alone)]
    for pair in pairs:
        rates = _rates(place, pair, copy, multiply)
        found.append(rates | _together(rates, alone))
    return found


def _together(rates: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    names = ("copy_bytes_per_s", "matmul_flops")
    return {"together": sum(rates[name] / alone[f"{name}_alone"] for name in names)}


def _works(place: Place) -> tuple[tuple[Callable[[], object], float], ...]:
    """A kernel that reads and writes 1 GiB, since what the driver copies with is not ours to place,
    and a multiplication."""
    source = torch.ones((1 << 28) // place.scale, device=place.device)
    target = torch.empty_like(source)
    n = 8192 // min(place.scale, 32)
    a, b = (torch.randn(n, n, device=place.device).to(place.dtype) for _ in range(2))
    product = torch.empty_like(a)
    return (
        (lambda: torch.neg(source, out=target), 2.0 * source.numel() * source.itemsize),
        (lambda: torch.mm(a, b, out=product), 2.0 * n**3),
    )


def _rates(
    place: Place,
    halves: tuple[Half, Half] | list[Half],
    copy: tuple[Callable[[], object], float],
    multiply: tuple[Callable[[], object], float],
) -> dict[str, Any]:
    one, other = Load(*copy, halves[0].stream), Load(*multiply, halves[1].stream)
    return {
        "processors": [half.processors for half in halves],
        "copy_bytes_per_s_alone": rate(place, one),
        "matmul_flops_alone": rate(place, other),
        "copy_bytes_per_s": rate(place, one, beside=other),
        "matmul_flops": rate(place, other, beside=one),
    }


def rate(place: Place, load: Load, beside: Load | None = None) -> float:
    """Amount per second while `beside` is at work from the first piece to the last: it is given
    twice as much until it outlasts this."""
    n, n_beside = (20, 40) if place.scale == 1 else (1, 1)
    for one in (load, beside):
        if one is not None:
            one.launch(place.cuda, 3)  # what a library sets up per stream
    while True:
        place.synchronise()
        if beside is not None:
            beside.launch(place.cuda, n_beside)
        began_s = time.perf_counter()
        load.launch(place.cuda, n)
        load.stream.synchronize()
        took_s = time.perf_counter() - began_s
        outlasted = beside is None or not beside.stream.query()
        place.synchronise()
        if outlasted:
            return n * load.amount / took_s
        n_beside *= 2


def halves(n: int) -> tuple[Half, Half]:
    """The GPU as `n` multiprocessors and the rest, by the driver's green contexts: those of torch
    each begin at the first multiprocessor, so that two of them would share some. Raises
    ImportError without NVIDIA's Python bindings, RuntimeError with what the driver says."""
    driver: Any = importlib.import_module("cuda.bindings.driver")  # comes with CUDA builds of torch
    cuda: Any = torch.cuda

    def asked(name: str, *arguments: Any) -> Any:
        code, *rest = getattr(driver, name)(*arguments)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {code.name}")
        return rest[0] if len(rest) == 1 else rest

    device = asked("cuDeviceGet", cuda.current_device())
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    all_of_it = asked("cuDeviceGetDevResource", device, kind)
    groups, _, rest = asked("cuDevSmResourceSplitByCount", 1, all_of_it, 0, n)
    made = []
    for resource in (groups[0], rest):
        description = asked("cuDevResourceGenerateDesc", [resource], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = asked("cuGreenCtxCreate", description, device, flags)
        non_blocking = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = asked("cuGreenCtxStreamCreate", context, non_blocking, 0)
        made.append(Half(resource.sm.smCount, cuda.ExternalStream(int(stream))))
    return made[0], made[1]
