"""The rates of a first look at a server that nobody has measured: five, up to its throughput."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from loadgen.errors import RunInvalid
from loadgen.records import Status
from loadgen.run.execute import FinishedRun, execute
from loadgen.run.run_options import RunOptions
from loadgen.workload.scenario import Scenario, scenario_from_flags

IN_FLIGHT = (4, 16, 64, 256)
"""Requests in flight of the short runs, until more of them no longer raise the throughput."""
WARMUP_S, MEASURE_S, DRAIN_S = 2.0, 6.0, 10.0
LEAST_S = 2 * (WARMUP_S + MEASURE_S)
MOST_S = len(IN_FLIGHT) * (WARMUP_S + MEASURE_S + DRAIN_S)
_STILL_GROWS = 1.3
_N_RATES = 5


def find_rates(
    target: str, options: RunOptions, console: Console, *, input_len: int, output_len: int
) -> list[float]:
    """Five rates per second up to the throughput of short closed loops, whose files are not
    kept. Raises KeyboardInterrupt when interrupted, RunInvalid where no request succeeded."""
    highest_per_s = 0.0
    with tempfile.TemporaryDirectory(prefix="slobench-rates-") as folder:
        for n_in_flight in IN_FLIGHT:
            run_dir = Path(folder) / str(n_in_flight)
            finished = execute(
                _closed_loop(n_in_flight, input_len, output_len),
                target,
                replace(options, out_dir=run_dir, name=f"rates-{n_in_flight}"),
                Console(quiet=True),
            )
            if finished.was_interrupted:
                raise KeyboardInterrupt
            per_s = _throughput_per_s(finished)
            console.print(
                f"{n_in_flight} requests in flight: {per_s:.3g} requests per second",
                markup=False,
                soft_wrap=True,
            )
            if per_s < highest_per_s * _STILL_GROWS:
                highest_per_s = max(highest_per_s, per_s)
                break
            highest_per_s = per_s
    if not highest_per_s:
        raise RunInvalid(
            f"{target}: no request succeeded within {MEASURE_S:g} s with {IN_FLIGHT[0]} or more in "
            f"flight; state the traffic yourself: slobench run --target {target} "
            f"--rate 0.1 --input-len {input_len} --output-len {output_len} --duration 5m"
        )
    return five_rates(highest_per_s)


def five_rates(highest_per_s: float) -> list[float]:
    """Five different rates in equal steps up to `highest_per_s` (above 0), rounded down to two
    significant digits of the first step."""
    step = highest_per_s / _N_RATES
    unit = 10.0 ** (math.floor(math.log10(step)) - 1)
    step = math.floor(step / unit + 1e-9) * unit
    return [float(f"{step * k:.6g}") for k in range(1, _N_RATES + 1)]


def _closed_loop(n_in_flight: int, input_len: int, output_len: int) -> Scenario:
    return scenario_from_flags(
        name="rates",
        concurrency=n_in_flight,
        input_len=input_len,
        output_len=output_len,
        warmup=f"{WARMUP_S}s",
        duration=f"{MEASURE_S}s",
        overrides={"phases.drain": f"{DRAIN_S}s"},
    )


def _throughput_per_s(finished: FinishedRun) -> float:
    """Successful requests per second that ended in the measured window."""
    rows = finished.run.request_rows
    is_ok = rows["status"] == Status.ok
    in_window = (rows["done_s"] >= WARMUP_S) & (rows["done_s"] < WARMUP_S + MEASURE_S)
    return float((is_ok & in_window).sum()) / MEASURE_S
