"""The result of a solution, as it is stored, and as lines of text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loadgen.manifest.json_section import JsonSection
from loadgen.measure.statistics.intervals import EstimateSection

SCHEMA = 1
_SAME = 0.02  # of the cost: what a ratio must be away from 1 to count as a gain


@dataclass(frozen=True)
class Averages:
    """Long-run averages under a rule. `cost` is the objective; `late_s` is defined in
    `smdp.batch_queue.Value`."""

    cost: float
    latency_s: float
    power_w: float
    late_s: float
    mean_batch: float


@dataclass(frozen=True)
class Simulated:
    """Simulations at a load: mean response time by rule, the share that met the e2e SLO by rule
    (empty without an SLO), and the cost under the table over that of the other two, paired by
    seed."""

    latency_s: dict[str, float]
    attainment: dict[str, float]
    to_greedy: EstimateSection
    to_limit: EstimateSection


@dataclass(frozen=True)
class Level:
    """A load as a share of what the best batches serve, the exact averages of three rules, and
    their simulations (None: not simulated). `limit` is the number of waiting requests from which
    the best rule of that form serves."""

    load: float
    rate_per_s: float
    limit: int
    greedy: Averages
    control_limit: Averages
    table: Averages
    batch_sizes: tuple[int, ...]
    simulated: Simulated | None


class Solved(JsonSection, frozen=True, kw_only=True):
    """A table of batch sizes with its value; the content of solve.json."""

    schema: int = SCHEMA
    kind: str = "solve"
    engine: str
    table: str
    cost_model: str
    weights: dict[str, float]
    slo_s: float | None
    service_s: tuple[float, ...]
    levels: tuple[Level, ...]
    notes: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The result, the service times, a row per load, and the notes."""
        yield self.sentence()
        yield f"  engine         {self.engine}"
        sizes = [b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) if b <= len(self.service_s)]
        times = ", ".join(f"{b}: {1e3 * self.service_s[b - 1]:.3g}" for b in sizes)
        yield f"  batch (ms)     {times}"
        weights = ", ".join(f"{name} {weight:g}" for name, weight in self.weights.items() if weight)
        yield f"  objective      {weights}"
        yield "exact cost of the queue, in seconds, and the cost in simulations under the table:"
        yield (
            f"  {'load':>5} {'req/s':>8} {'greedy':>9} {'best limit':>15} {'table':>9}"
            f"   {'simulated, over greedy':24} over best limit"
        )
        for level in self.levels:
            limit = f"{level.control_limit.cost:.4g} (q={level.limit})"
            ratios = ("not simulated", "")
            if level.simulated is not None:
                ratios = (_ratio(level.simulated.to_greedy), _ratio(level.simulated.to_limit))
            yield (
                f"  {level.load:5.0%} {level.rate_per_s:8.4g} {level.greedy.cost:9.4g} "
                f"{limit:>15} {level.table.cost:9.4g}   {ratios[0]:24} {ratios[1]}"
            )
        yield "batch sizes by waiting requests (from 1):"
        for level in self.levels:
            shown = " ".join(str(size) for size in level.batch_sizes[1:25])
            yield f"  {level.load:5.0%} {shown}"
        for level in self.levels:
            if level.simulated is not None and level.simulated.attainment:
                shares = ", ".join(f"{k} {v:.1%}" for k, v in level.simulated.attainment.items())
                yield f"  {level.load:5.0%} met the SLO: {shares}"
        for note in self.notes:
            yield f"note: {note}"

    def sentence(self) -> str:
        """The gain over greedy and over the best control limit, by the simulations if any."""
        gains = {
            "greedy": [self._gain(level, "to_greedy", level.greedy) for level in self.levels],
            "the best control limit": [
                self._gain(level, "to_limit", level.control_limit) for level in self.levels
            ],
        }
        how = "simulated" if any(level.simulated for level in self.levels) else "computed"
        parts = []
        for rule, values in gains.items():
            best = max(values)
            if best < _SAME:
                parts.append(f"no gain over {rule}")
                continue
            at = self.levels[values.index(best)].load
            parts.append(f"up to {best:.0%} below {rule} (at {at:.0%} load)")
        return f"cost ({how}): {'; '.join(parts)}"

    @staticmethod
    def _gain(level: Level, name: str, other: Averages) -> float:
        """The relative gain at a load that is proven: 0 where the interval contains 1."""
        if level.simulated is None:
            return 1 - level.table.cost / other.cost
        ratio: EstimateSection = getattr(level.simulated, name)
        if ratio.value is None or (ratio.high is not None and ratio.high >= 1):
            return 0.0
        return 1 - ratio.value


def _ratio(ratio: EstimateSection) -> str:
    if ratio.value is None:
        return "no ratio"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f} (n={ratio.n})"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
