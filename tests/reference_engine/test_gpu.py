"""GPU telemetry: readings from NVML, their units, and their series in `/metrics`."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from reference_engine.metrics.exposition import Moment, page
from reference_engine.metrics.gpu import Gpu, GpuReading, open_gpu
from reference_engine.metrics.metrics import EngineMetrics
from reference_engine.serving.build import build
from targets.server_metrics import read_metrics
from tests.reference_engine.engine_server import serving, toy_options


class NotSupported(Exception):
    """As pynvml raises for a reading that a GPU does not support."""


def library(**answers):
    """A stand-in with NVML's names and units (percent, bytes, milliwatts, MHz)."""

    def reader(name):
        def read(handle, *more):
            assert handle == "handle-1"
            answer = answers.get(name)
            if answer is None:
                raise NotSupported(name)
            return answer

        return read

    return SimpleNamespace(
        NVMLError=NotSupported, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1,
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID={"GPU-5": "handle-1"}.__getitem__,
        nvmlDeviceGetIndex=lambda handle: int(handle.removeprefix("handle-")),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetUtilizationRates=reader("busy"), nvmlDeviceGetMemoryInfo=reader("memory"),
        nvmlDeviceGetPowerUsage=reader("power"), nvmlDeviceGetTemperature=reader("temperature"),
        nvmlDeviceGetClockInfo=reader("clock"),
    )  # fmt: skip


FULL = {
    "busy": SimpleNamespace(gpu=75, memory=3),
    "memory": SimpleNamespace(used=3 << 30, total=140 << 30),
    "power": 512_300,
    "temperature": 61,
    "clock": 1980,
}


def test_readings_are_in_si_units():
    assert Gpu(library(**FULL), "GPU-5").read() == GpuReading(
        1, "GPU-5", "NVIDIA H200", 0.75, 3 << 30, 512.3, 61.0, 1.98e9
    )


def test_unsupported_readings_are_left_out():
    reading = Gpu(library(**FULL | {"power": None, "busy": None}), "GPU-5").read()
    assert (reading.power_w, reading.utilization, reading.temperature_c) == (None, None, 61.0)
    text = page(EngineMetrics(100), Moment("m", 0, 0, 0.0, {}, {}, 0, {}, reading)).decode()
    assert "DCGM_FI_DEV_POWER_USAGE" not in text
    assert 'gpu="1",modelName="NVIDIA H200",model_name="m"} 1980.0' in text


def test_the_load_generator_parses_the_gpu_series():
    reading = Gpu(library(**FULL), "GPU-5").read()
    text = page(EngineMetrics(100), Moment("m", 0, 0, 0.0, {}, {}, 0, {}, reading)).decode()
    read = read_metrics(text)
    assert read["gpu_utilization"] == pytest.approx(0.75)
    assert read["gpu_memory_bytes"] == 3 << 30
    assert read["gpu_power_w"] == pytest.approx(512.3)


def test_without_a_gpu_there_are_no_gpu_series():
    assert b"DCGM" not in page(EngineMetrics(100), Moment("m", 0, 0, 0.0, {}, {}, 0, {}))


def test_the_gpu_series_are_those_of_the_executors_gpu(monkeypatch):
    """By its UUID: CUDA may hide devices, and may number the fastest first."""
    monkeypatch.setitem(sys.modules, "pynvml", library(**FULL))
    engine = build(toy_options())
    monkeypatch.setattr(engine.executor, "caps", replace(engine.executor.caps, gpu="GPU-5"))

    async def scraped():
        async with serving(engine) as server:
            return await server.text("/metrics")

    assert 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-5",' in asyncio.run(scraped())


def test_without_a_driver_there_is_no_telemetry_but_a_warning(caplog):
    gpu = open_gpu("GPU-5")
    if gpu is not None:
        pytest.skip("there is a GPU")
    assert "no GPU telemetry in /metrics" in caplog.text
