"""Simulated nights: runs of requests with heavy tails, and noise that whole runs share."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.measures import measure
from loadgen.studies.compare.judgement import Options, Verdict, judge, settle
from loadgen.studies.nightly.record import CellNight, RunNumbers

N_REQUESTS = 400
TPOT_RUN_SD, TPOT_REQUEST_SD = 0.04, 0.2
TTFT_RUN_SD, TTFT_REQUEST_SD = 0.08, 0.7
MEASURES = tuple(map(measure, ("p50(ttft)", "p99(ttft)", "mean(tpot)", "error_rate")))


def runs(
    rng: np.random.Generator, n_runs: int, slower: float = 1.0, n_requests: int = N_REQUESTS
) -> NDArray[np.float64]:
    """One number per run and measure, shape [4, n_runs]: as `Measured.value` would take them.

    A run's server, neighbours and minute shift all its requests; 3 % of them wait behind a long
    prompt; 0.2 % fail.
    """
    shape = (n_runs, n_requests)
    tpot_s = (
        0.02
        * slower
        * np.exp(rng.normal(0, TPOT_RUN_SD, (n_runs, 1)) + rng.normal(0, TPOT_REQUEST_SD, shape))
    )
    ttft_s = 0.15 * np.exp(
        rng.normal(0, TTFT_RUN_SD, (n_runs, 1)) + rng.normal(0, TTFT_REQUEST_SD, shape)
    ) + rng.exponential(0.5, shape) * (rng.random(shape) < 0.03)
    rank = math.ceil(0.99 * n_requests) - 1
    return np.array(
        [
            np.median(ttft_s, axis=1),
            np.partition(ttft_s, rank, axis=1)[:, rank],
            tpot_s.mean(axis=1),
            rng.binomial(n_requests, 0.002, n_runs) / n_requests,
        ]
    )


def cell_night(
    rng: np.random.Generator,
    k: int,
    n_runs: int,
    slower: float = 1.0,
    night_sd: tuple[float, float] = (0.0, 0.0),
    cell: str = "chat",
) -> CellNight:
    """Night number `k` of one cell as the baseline keeps it; `night_sd` of TPOT and TTFT is what
    the level of a whole night varies by, as a standard deviation of logarithms."""
    tpot, ttft = np.exp(rng.normal(0, night_sd))
    numbers = runs(rng, n_runs, slower)
    numbers = numbers * np.array([ttft, ttft, tpot, 1.0])[:, None]
    return CellNight(
        cell=cell,
        night=f"{20260000 + k:08d}T030000.000000Z",
        started_utc="2026-01-01T03:00:00+00:00",
        factor={"git": f"{k:x}"},
        slos=(),
        is_closed_loop=False,
        runs=tuple(
            RunNumbers(
                name=f"{k}/r{r}",
                schedule_sha256=f"{k}-{r}",
                n_due=N_REQUESTS,
                reasons=(),
                values={m.text: float(v) for m, v in zip(MEASURES, of_run, strict=True)},
            )
            for r, of_run in enumerate(numbers.T)
        ),
    )


def beside_controls(
    rng: np.random.Generator,
    k: int,
    n_runs: int,
    slower: float = 1.0,
    pace: float = 1.0,
    pair_sd: float = 0.0,
) -> CellNight:
    """Night number `k` of a cell with a control. The machine takes `pace` times as long for all,
    and for both runs of a pair the same more or less (`pair_sd`, of logarithms); the cell alone
    takes `slower` times as long. What else runs differ by is each run's own."""
    own, control = cell_night(rng, k, n_runs, slower), cell_night(rng, k, n_runs)
    pairs = []
    for of_cell, of_control in zip(own.runs, control.runs, strict=True):
        times = pace * math.exp(rng.normal(0, pair_sd))
        pairs.append(
            dataclasses.replace(_stretched(of_cell, times), control=_stretched(of_control, times))
        )
    return dataclasses.replace(own, runs=tuple(pairs))


def without_controls(night: CellNight) -> CellNight:
    return dataclasses.replace(
        night, runs=tuple(dataclasses.replace(run, control=None) for run in night.runs)
    )


def disturbed(rng: np.random.Generator, night: CellNight, share: float) -> CellNight:
    """The night with a neighbour next to this share of its runs and of its controls, which makes
    them 10 to 40 % slower."""

    def beside(run: RunNumbers) -> RunNumbers:
        return _stretched(run, rng.uniform(1.1, 1.4)) if rng.random() < share else run

    runs = [
        dataclasses.replace(beside(run), control=run.control and beside(run.control))
        for run in night.runs
    ]
    return dataclasses.replace(night, runs=tuple(runs)) if share else night


def _stretched(run: RunNumbers, times: float) -> RunNumbers:
    """A run on a machine that takes so many times as long; failures are none of its doing."""
    values = {
        text: value if text == "error_rate" else value * times for text, value in run.values.items()
    }
    return dataclasses.replace(run, values=values)


def verdicts(
    a: NDArray[np.float64], b: NDArray[np.float64], options: Options | None = None
) -> dict[str, Verdict]:
    """Measure → verdict of one night, all four gated."""
    chosen = options or Options()
    n_due = (a.shape[1] * N_REQUESTS, b.shape[1] * N_REQUESTS)
    rows = []
    for asked, of_a, of_b in zip(MEASURES, a, b, strict=True):
        found, row = judge(asked, (of_a, of_b), None, chosen, n_due)
        rows.append((found, dataclasses.replace(row, is_gated=True)))
    return {row.measure: row.verdict for row in settle(rows, chosen.confidence, plans=False)}


def oracle_runs(slowdown: float) -> int:
    """Runs a side of a two-sample z test at 5 % that knows the noise, for 90 % power."""
    of_mean = math.log1p(math.expm1(TPOT_REQUEST_SD**2) / N_REQUESTS)  # lognormal mean of a run
    variance = TPOT_RUN_SD**2 + of_mean
    return math.ceil(2 * (1.959964 + 1.281552) ** 2 * variance / math.log(slowdown) ** 2)
