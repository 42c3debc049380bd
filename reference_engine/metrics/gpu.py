"""What NVIDIA's management library (NVML) says about the GPU that the engine computes on."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One moment of one GPU. `utilization` is the share of the last sampling period in which a
    kernel ran, 0-1; it says nothing of how well. None is what this GPU does not tell."""

    index: int
    uuid: str
    name: str
    utilization: float | None
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_hz: float | None


class Gpu:
    """One GPU through `nvml`, the module pynvml. Reading takes about a millisecond."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml, self._uuid = nvml, uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._index = int(nvml.nvmlDeviceGetIndex(self._handle))
        self._name = str(nvml.nvmlDeviceGetName(self._handle))

    def read(self) -> GpuReading:
        nvml = self._nvml
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts = self._ask(nvml.nvmlDeviceGetPowerUsage)
        celsius = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        megahertz = self._ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
        return GpuReading(
            self._index,
            self._uuid,
            self._name,
            None if busy is None else busy.gpu / 100,
            None if memory is None else int(memory.used),
            None if milliwatts is None else milliwatts / 1e3,
            None if celsius is None else float(celsius),
            None if megahertz is None else megahertz * 1e6,
        )

    def _ask(self, question: Any, *more: Any) -> Any:
        try:
            return question(self._handle, *more)
        except self._nvml.NVMLError as error:
            log.debug("NVML: %s", error)  # at each reading the same: this GPU does not tell
            return None


def open_gpu(uuid: str) -> Gpu | None:
    """The GPU of this name, `GPU-…` (numbers of CUDA are not NVML's: devices may be hidden or in
    another order), or None, said once in the log, where the library or the driver is missing."""
    try:
        import pynvml
    except ModuleNotFoundError:
        log.warning("no GPU telemetry in /metrics: pip install nvidia-ml-py")
        return None
    try:
        pynvml.nvmlInit()
        return Gpu(pynvml, uuid)
    except pynvml.NVMLError as error:
        log.warning("no GPU telemetry in /metrics: NVML: %s", error)
        return None
