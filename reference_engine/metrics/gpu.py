"""Telemetry of the GPU that the engine computes on, from NVIDIA's management library (NVML)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Readings of a GPU at a moment; None where this GPU does not support a reading.
    `utilization` is the share of the last sampling period in which any kernel ran, 0 to 1, however
    little of the GPU it used."""

    index: int
    uuid: str
    name: str
    utilization: float | None
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_hz: float | None


class Gpu:
    """A GPU, read through `nvml`, the module pynvml. A reading takes about a millisecond."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml, self._uuid = nvml, uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._index = int(nvml.nvmlDeviceGetIndex(self._handle))
        self._name = str(nvml.nvmlDeviceGetName(self._handle))

    def read(self) -> GpuReading:
        nvml = self._nvml
        busy = self._value(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._value(nvml.nvmlDeviceGetMemoryInfo)
        milliwatts = self._value(nvml.nvmlDeviceGetPowerUsage)
        celsius = self._value(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        megahertz = self._value(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM)
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

    def _value(self, read: Any, *arguments: Any) -> Any:
        try:
            return read(self._handle, *arguments)
        except self._nvml.NVMLError as error:
            log.debug("NVML: %s", error)  # the same at each reading: not supported by this GPU
            return None


def open_gpu(uuid: str) -> Gpu | None:
    """The GPU with this UUID (`GPU-…`), or None, with a warning in the log, if the library or the
    driver is missing. CUDA's device numbers would not do: CUDA may hide or reorder devices."""
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
