"""The power of a GPU, from the server's own metrics during a capacity search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.drive.store import read_run
from loadgen.measure.attainment import measured_window
from loadgen.measure.server_load import points

_SERIES = "gpu_power_w"  # of all GPUs of the server together


@dataclass(frozen=True)
class MeasuredPower:
    """Watts of a GPU, the mean over the measured window of a probe at `level_per_s` requests/s."""

    watts_per_gpu: float
    level_per_s: float


def measured_power(
    directory: Path, content: Mapping[str, Any], near_per_s: float, gpus_per_replica: int
) -> MeasuredPower | None:
    """The power in the probe with the load nearest to `near_per_s`, of a search whose
    `capacity.json` has `content`. None if no measured probe read the power."""
    probes = [probe for probe in content.get("probes", ()) if probe["grade"] == "measured"]
    for probe in sorted(probes, key=lambda probe: abs(probe["level"] - near_per_s)):
        place = directory / "probes" / probe["name"]
        if not (place / "server.parquet").is_file():
            continue
        run = read_run(place)
        window = measured_window(run)
        t_s, watts = points(run, _SERIES)
        watts = watts[(t_s >= window.start_s) & (t_s <= window.end_s)]
        if len(watts):
            return MeasuredPower(float(watts.mean()) / gpus_per_replica, float(probe["level"]))
    return None
