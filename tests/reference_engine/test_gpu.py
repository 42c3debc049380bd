"""GPU telemetry: what NVML answers, in which units, and what becomes of it in `/metrics`."""

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
    """As pynvml raises for what a GPU does not tell."""


def library(**answers):
    """A stand-in with NVML's names and units (percent, bytes, milliwatts, MHz)."""

    def told(name):
        def ask(handle, *more):
            assert handle == "handle-1"
            answer = answers.get(name)
            if answer is None:
                raise NotSupported(name)
            return answer

        return ask

    return SimpleNamespace(
        NVMLError=NotSupported, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=1,
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID={"GPU-5": "handle-1"}.__getitem__,
        nvmlDeviceGetIndex=lambda handle: int(handle.removeprefix("handle-")),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetUtilizationRates=told("busy"), nvmlDeviceGetMemoryInfo=told("memory"),
        nvmlDeviceGetPowerUsage=told("power"), nvmlDeviceGetTemperature=told("temperature"),
        nvmlDeviceGetClockInfo=told("clock"),
    )  # fmt: skip


FULL = {
    "busy": SimpleNamespace(gpu=75, memory=3),
    "memory": SimpleNamespace(used=3 << 30, total=140 << 30),
    "power": 512_300,
    "temperature": 61,
    "clock": 1980,
}


def test_a_reading_is_in_our_units():
    assert Gpu(library(**FULL), "GPU-5").read() == GpuReading(
        1, "GPU-5", "NVIDIA H200", 0.75, 3 << 30, 512.3, 61.0, 1.98e9
    )


def test_what_a_gpu_does_not_tell_is_left_out():
    reading = Gpu(library(**FULL | {"power": None, "busy": None}), "GPU-5").read()
    assert (reading.power_w, reading.utilization, reading.temperature_c) == (None, None, 61.0)
    text = page(EngineMetrics(100), Moment("m", 0, 0, 0.0, {}, {}, 0, {}, reading)).decode()
    assert "DCGM_FI_DEV_POWER_USAGE" not in text
    assert 'gpu="1",modelName="NVIDIA H200",model_name="m"} 1980.0' in text


def test_a_run_reads_it_as_it_reads_dcgm():
    reading = Gpu(library(**FULL), "GPU-5").read()
    text = page(EngineMetrics(100), Moment("m", 0, 0, 0.0, {}, {}, 0, {}, reading)).decode()
    found = read_metrics(text)
    assert found["gpu_utilization"] == pytest.approx(0.75)
    assert found["gpu_memory_bytes"] == 3 << 30
    assert found["gpu_power_w"] == pytest.approx(512.3)


def test_without_a_gpu_nothing_is_said_of_one():
    assert b"DCGM" not in page(EngineMetrics(100), Moment("m", 0, 0, 0.0, {}, {}, 0, {}))


def test_a_server_tells_of_the_gpu_that_its_executor_computes_on(monkeypatch):
    """By its UUID: numbers are CUDA's, which hides some and may count the fastest first."""
    monkeypatch.setitem(sys.modules, "pynvml", library(**FULL))
    engine = build(toy_options())
    monkeypatch.setattr(engine.executor, "caps", replace(engine.executor.caps, gpu="GPU-5"))

    async def scraped():
        async with serving(engine) as server:
            return await server.text("/metrics")

    assert 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-5",' in asyncio.run(scraped())


def test_without_a_driver_there_is_no_telemetry_and_the_log_says_so(caplog):
    gpu = open_gpu("GPU-5")
    if gpu is not None:
        pytest.skip("there is a GPU")
    assert "no GPU telemetry in /metrics" in caplog.text
