"""The capacity from the schedule that was sent, with its interval.

Misses are a logistic function of the virtual wait (`virtual_wait`), of the load, of a request's own
lengths and of its class. The capacity is the load at which the long-run law of that wait, simulated
from the scenario, misses 1 − target. The speed of the fluid server and the unit of work (a request,
its input tokens, its output tokens, or mixtures) are averaged over by their likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from loadgen.measure.statistics.student_t import student_t
from loadgen.studies.capacity.miss_law import MissLaw, expit, fit
from loadgen.studies.capacity.probe import Array
from loadgen.studies.capacity.traffic import Law, Traffic, joined
from loadgen.studies.capacity.virtual_wait import virtual_wait

_SPEEDS = np.geomspace(0.5, 2.3, 13)  # of the fluid server, over the throughput
_FEW_SPEEDS = _SPEEDS[1::3]  # for the choice of the unit of work
_BETWEEN = np.array([-0.75, -0.5, -0.25, 0.25, 0.5, 0.75])  # speeds beside the likeliest, in steps
_SPEED_SD = 0.15  # of the prior of ln(speed / throughput), beside the error of the throughput
_N_UNITS, _UNIT_LOGS = 2, 3.0  # units of work that are kept, and how far below the best
_LEAST_OUTCOMES = 3  # misses, and requests that met the SLO
_LEVEL_MEAN, _LEVEL_SD = 2.0, 2.0  # prior of the fall, in log-odds per e-fold load, at equal waits
_WAIT_SD, _OWN_SD, _CLASS_SD = 1.0, 1.0, 3.0
_HELD = 1e6  # penalty of an effect that is held at 0
_TEMPER, _OF_DISPERSION = 12.0, 0.4  # the likelihood counts that many dependent requests as one
_LEAST_WEIGHT = 0.1
_N_LAW, _RUN_IN = 40_000, 0.04
_STEP = 0.08  # in ln(load) between the loads at which the long-run law is simulated
_BELOW, _ABOVE = 1 / 1.5, 1.3  # of the lowest and highest probe: a capacity beyond is no answer
_NEAR_BELOW, _NEAR_ABOVE = 0.4, 1.8
_N_BLOCKS, _N_LAW_BLOCKS = 14, 30
_LEAST_RISE = 1.0  # of the share of misses per e-fold load, over the share allowed
_FLOOR_SD, _INFLATION = 0.03, 1.3
_LEAST_DF, _MOST_DF = 3.0, 12.0
_LEAST_LOGS, _LEAST_CLUMPS = 25.0, 1.0
_TINY = 1e-9


@dataclass(frozen=True)
class Sample:
    """A probe's load, its requests from an idle server on, and whether each missed (0 or 1)."""

    level: float
    traffic: Traffic
    missed: Array


class Speed(NamedTuple):
    """The rate at which the overloaded server ended requests, and the standard error of its
    logarithm."""

    per_s: float
    se: float


class Estimate(NamedTuple):
    """The capacity with its interval; `sd` is the standard error of its logarithm."""

    value: float
    low: float
    high: float
    sd: float


class Refuted(NamedTuple):
    """No estimate, and the reason."""

    why: str


def capacity(
    samples: Sequence[Sample],
    target: float,
    speed: Speed,
    law: Law,
    start: float,
    confidence: float = 0.95,
) -> Estimate | Refuted:
    """The load at which a share `target` meets its SLOs in the long run. `start` is a first guess.

    Probes between 0.4 and 1.8 times the estimate count. Refuted: too few outcomes of a kind; the
    virtual wait explains too little of the misses (2 × 25 in deviance, and at least as much as
    dependent noise would); or no load near the probes has that share of misses.
    """
    first = _Fit(samples, target, speed, law).estimate(start, confidence)
    if isinstance(first, Refuted):
        return first
    near = [s for s in samples if _NEAR_BELOW <= s.level / first.value <= _NEAR_ABOVE]
    if len(near) in (0, len(samples)):
        return first
    return _Fit(near, target, speed, law).estimate(first.value, confidence)


class _Candidate(NamedTuple):
    unit: Array  # weights of a request, its input, its new and its output tokens
    per_s: float
    scale_s: float
    design: Array
    law: MissLaw


class _LongRun(NamedTuple):
    """Of a long run's requests: the wait in units of the scale, ln(1 + wait), the other columns,
    and the probabilities of a miss."""

    scaled: Array
    logs: Array
    others: Array
    misses: Array


class _Crossing(NamedTuple):
    """The load at which the long run misses 1 − target, and the rise of the misses per e-fold load
    there."""

    level: float
    rise: float


class _Fit:
    def __init__(self, samples: Sequence[Sample], target: float, speed: Speed, law: Law) -> None:
        self._samples, self._target, self._speed, self._law = samples, target, speed, law
        self._missed = np.concatenate([sample.missed for sample in samples])
        self._all = joined([sample.traffic for sample in samples])
        self._mean = self._all.tokens.mean(axis=1)
        logs = np.log1p(self._all.tokens[1:])
        varies = logs.std(axis=1) > 0.02
        if np.allclose(logs[0], logs[1]):
            varies[1] = False
        self._own = [(row, logs[row].mean(), logs[row].std()) for row in np.flatnonzero(varies)]
        self._n_classes = int(self._all.class_id.max(initial=0)) + 1
        levels = np.array([sample.level for sample in samples])
        sizes = np.array([len(sample.missed) for sample in samples])
        self._reference = float(np.average(np.log(levels), weights=sizes))
        self._range = float(levels.min()) * _BELOW, float(levels.max()) * _ABOVE
        self._beside_at: dict[float, tuple[Traffic, Array]] = {}
        self._beside = np.concatenate([self._others(s.traffic, s.level) for s in samples])
        sds = [_WAIT_SD] * 2 + [_LEVEL_SD] + [_OWN_SD] * len(self._own)
        sds += [_CLASS_SD] * (self._n_classes - 1)
        self._penalty = np.r_[0.0, _TEMPER / np.square(sds)]
        self._centre = np.zeros(len(self._penalty))
        self._centre[3] = _LEVEL_MEAN

    def estimate(self, start: float, confidence: float) -> Estimate | Refuted:
        n, n_missed = len(self._missed), int(self._missed.sum())
        if min(n_missed, n - n_missed) < _LEAST_OUTCOMES:
            return Refuted(f"{n_missed} of {n} requests near it missed the SLO: too few of a kind")
        candidates = self._candidates()
        best = max(candidates, key=lambda candidate: candidate.law.log_likelihood)
        dispersion = self._dispersion(best)
        flat = self._design(np.zeros(n), 1.0, self._beside)
        logs = best.law.log_likelihood - self._fitted(flat).log_likelihood
        if logs < max(_LEAST_LOGS, _LEAST_CLUMPS * dispersion):
            return Refuted("the schedule does not explain the misses")
        temper = max(_TEMPER, _OF_DISPERSION * dispersion)
        parts: list[tuple[float, float, float, float]] = []
        for weight, candidate in self._weighted(candidates, best, temper):
            crossing = self._crossing(candidate, start)
            if crossing is not None and self._range[0] <= crossing.level <= self._range[1]:
                spread = self._variance(candidate, crossing)
                parts.append((weight, math.log(crossing.level), *spread))
                start = crossing.level
        if not parts:
            return Refuted("no load near the probes has the required share of misses")
        weights, logs_of_level, variances, blocks = np.array(parts).T
        weights = weights / weights.sum()
        mean = float(weights @ logs_of_level)
        variance = float(weights @ (variances + np.square(logs_of_level - mean)))
        sd = _INFLATION * math.sqrt(variance + _FLOOR_SD**2)
        df = min(_MOST_DF, max(_LEAST_DF, 3 * float(weights @ blocks) - 2))
        reach = student_t((1 + confidence) / 2, df) * sd
        return Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), sd)

    def _others(self, traffic: Traffic, level: float) -> Array:
        """Columns beside the wait: ln(load), lengths in standard deviations, classes."""
        tokens = traffic.tokens[1:]
        columns = [np.full(len(traffic), math.log(level) - self._reference)]
        columns += [(np.log1p(tokens[row]) - mean) / sd for row, mean, sd in self._own]
        columns += [(traffic.class_id == k).astype(float) for k in range(1, self._n_classes)]
        return np.stack(columns, axis=1)

    @staticmethod
    def _design(waits_s: Array, scale_s: float, others: Array) -> Array:
        scaled = waits_s / scale_s
        ones = np.ones(len(scaled))
        return np.column_stack([ones, scaled, np.log1p(scaled), others])

    def _waits_s(self, traffic: Traffic, unit: Array, per_s: float) -> Array:
        return virtual_wait(traffic.at_s, (unit / self._mean) @ traffic.tokens, per_s)

    def _units(self) -> Iterator[Array]:
        yield np.array([1.0, 0.0, 0.0, 0.0])
        varying = [int(row) + 1 for row, _, _ in self._own]
        for k in varying:
            for share in (0.5, 1.0):
                unit = np.zeros(4)
                unit[0], unit[k] = 1 - share, share
                yield unit
        for k in varying:
            if k != 3 and 3 in varying:
                unit = np.zeros(4)
                unit[k] = unit[3] = 0.5
                yield unit

    def _candidates(self) -> list[_Candidate]:
        units = list(self._units())
        if len(units) > 1:
            speeds = (self._speed.per_s * _FEW_SPEEDS).tolist()
            logs = [
                max(self._candidate(unit, per_s).law.log_likelihood for per_s in speeds)
                for unit in units
            ]
            ranked = np.argsort(logs)[::-1][:_N_UNITS]
            units = [units[k] for k in ranked if logs[k] > max(logs) - _UNIT_LOGS]
        speeds = (self._speed.per_s * _SPEEDS).tolist()
        candidates = [self._candidate(unit, per_s) for unit in units for per_s in speeds]
        best = max(candidates, key=lambda candidate: candidate.law.log_likelihood)
        beside = best.per_s * (_SPEEDS[1] / _SPEEDS[0]) ** _BETWEEN
        return candidates + [self._candidate(best.unit, per_s) for per_s in beside.tolist()]

    def _candidate(self, unit: Array, per_s: float) -> _Candidate:
        waits_s = np.concatenate([self._waits_s(s.traffic, unit, per_s) for s in self._samples])
        waited = waits_s[waits_s > 0]
        scale_s = float(np.quantile(waited, 0.7)) if len(waited) > 20 else 1.0
        design = self._design(waits_s, scale_s, self._beside)
        return _Candidate(unit, per_s, scale_s, design, self._fitted(design))

    def _fitted(self, design: Array) -> MissLaw:
        """The law of a design; neither a longer wait nor a higher load ever helps: effects that
        would make it so are held at 0."""
        penalty, centre = self._penalty.copy(), self._centre.copy()
        law = fit(design, self._missed, penalty, centre)
        for _ in range(3):
            wait, log_wait, level = law.effects[1:4].tolist()
            falling = (wait < 0, wait + log_wait < 0, level < 0)
            free = [k for k in (1, 2, 3) if falling[k - 1] and penalty[k] < _HELD]
            if not free:
                break
            penalty[free[0]], centre[free[0]] = _HELD, 0.0
            law = fit(design, self._missed, penalty, centre)
        return law

    def _weighted(
        self, candidates: Sequence[_Candidate], best: _Candidate, temper: float
    ) -> list[tuple[float, _Candidate]]:
        """Candidates with their posterior weights over the largest, of those that carry any."""
        spread = 2 * (_SPEED_SD**2 + self._speed.se**2)
        logs = np.array(
            [
                (each.law.log_likelihood - best.law.log_likelihood) / temper
                - math.log(each.per_s / self._speed.per_s) ** 2 / spread
                for each in candidates
            ]
        )
        weights = np.exp(logs - logs.max()).tolist()
        pairs = zip(weights, candidates, strict=True)
        return [(weight, each) for weight, each in pairs if weight >= _LEAST_WEIGHT]

    def _long_run(self, candidate: _Candidate, level: float) -> _LongRun:
        """A long run at a load, its run-in left out."""
        if level not in self._beside_at:
            traffic = self._law(level, _N_LAW)
            self._beside_at[level] = traffic, self._others(traffic, level)
        traffic, others = self._beside_at[level]
        first = int(_RUN_IN * len(traffic))
        waits_s = self._waits_s(traffic, candidate.unit, candidate.per_s)[first:]
        scaled, others = waits_s / candidate.scale_s, others[first:]
        logs, effects = np.log1p(scaled), candidate.law.effects
        eta = effects[0] + effects[1] * scaled + effects[2] * logs + others @ effects[3:]
        return _LongRun(scaled, logs, others, expit(eta))

    def _crossing(self, candidate: _Candidate, start: float) -> _Crossing | None:
        """The load at which the long run misses 1 − target: from `start` in steps of 8 %, then
        between two of them, linear in log-odds. None beyond the probes."""
        goal = math.log((1 - self._target) / self._target)
        seen: dict[int, float] = {}

        def excess(k: int) -> float:
            if k not in seen:
                share = float(self._long_run(candidate, math.exp(k * _STEP)).misses.mean())
                share = min(max(share, _TINY), 1 - _TINY)
                seen[k] = math.log(share / (1 - share)) - goal
            return seen[k]

        low, high = (math.log(end) / _STEP for end in self._range)
        k = math.floor(math.log(start) / _STEP)
        while low - 1 <= k <= high and not excess(k) <= 0 < excess(k + 1):
            step = 1 if excess(k + 1) <= 0 else -1
            if k + step in seen and k + step + 1 in seen:
                return None
            k += step
        if not low - 1 <= k <= high:
            return None
        odds, allowed = excess(k + 1) - excess(k), 1 - self._target
        rise = allowed * max(self._target * odds / _STEP, _LEAST_RISE)
        return _Crossing(math.exp((k - excess(k) / odds) * _STEP), rise)

    def _blocks(self) -> Iterator[slice]:
        """Stretches of the probes' requests, about 14 in all, at least one per probe."""
        first = 0
        for sample in self._samples:
            n = max(1, round(_N_BLOCKS * len(sample.missed) / len(self._missed)))
            for part in np.array_split(np.arange(len(sample.missed)), n):
                yield slice(first + int(part[0]), first + int(part[-1]) + 1)
            first += len(sample.missed)

    def _dispersion(self, candidate: _Candidate) -> float:
        """The variance of the residuals' sums over blocks, over that of independent requests."""
        share = candidate.law.misses(candidate.design)
        rest, variance = self._missed - share, share * (1 - share)
        sums = np.array([rest[block].sum() for block in self._blocks()])
        return float(np.square(sums).sum() / max(variance.sum(), _TINY))

    def _variance(self, candidate: _Candidate, crossing: _Crossing) -> tuple[float, float]:
        """(variance of ln(capacity), effective number of blocks): the law's effects by a one-step
        jackknife over blocks of neighbours, through the long run (delta method), its own error
        added.

        Source: D. Pregibon, Ann. Stat. 9(4), 1981 (one-step deletion); Bell & McCaffrey, Survey
        Methodology 28(2), 2002 (few clusters).
        """
        run = self._long_run(candidate, crossing.level)
        spread, n = run.misses * (1 - run.misses), len(run.misses)
        of_wait = np.array([spread.sum(), spread @ run.scaled, spread @ run.logs])
        gradient = np.r_[of_wait, spread @ run.others] / n
        fitted = expit(candidate.design @ candidate.law.effects)
        scores = candidate.design * (self._missed - fitted)[:, None]
        spread, curvature = fitted * (1 - fitted), candidate.law.curvature
        shifts = []
        for block in self._blocks():
            rows = candidate.design[block]
            without = curvature - (rows.T * spread[block]) @ rows
            shifts.append(float(np.linalg.solve(without, scores[block].sum(axis=0)) @ gradient))
        squares = np.square(shifts)
        prior = np.linalg.solve(curvature, gradient)
        total = float(squares.sum()) * (len(squares) - 1) / len(squares)
        total += _TEMPER * float(np.square(prior) @ self._penalty)
        means = np.array([part.mean() for part in np.array_split(run.misses, _N_LAW_BLOCKS)])
        total += float(means.var(ddof=1)) / _N_LAW_BLOCKS
        n_blocks = float(squares.sum()) ** 2 / max(float(np.square(squares).sum()), 1e-300)
        return total / crossing.rise**2, n_blocks
