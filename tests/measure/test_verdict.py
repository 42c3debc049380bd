"""Results of single SLOs, with literal expected values."""

import numpy as np

from loadgen.measure.slo import parse_slo
from loadgen.measure.statistics.population import Population
from loadgen.measure.verdict import mean_result


def test_the_samples_that_a_mean_needs_grow_with_the_square_of_the_interval():
    """1 to 5 s: mean 3 s, upper bound 3 + 2.132 · √(2.5 / 5) s; 5 · (1.507 / 0.5)² = 45.4."""
    result = mean_result(parse_slo("mean(ttft) <= 3.5s"), Population(np.arange(1.0, 6.0)), 0.95)
    assert (result.met, result.proven, result.n_needed) == (True, False, 46)
