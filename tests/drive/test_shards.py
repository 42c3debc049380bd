"""How far the epoch is put off when the shards are told to start."""

import numpy as np
import pytest

from loadgen.drive.shards import lead_ns


@pytest.mark.parametrize(
    ("scheduled_s", "expected_ns"),
    [
        ([[0.0, 1.0]], 50_000_000),
        ([[0.02, np.nan], [0.03]], 30_000_000),
        ([[0.05, 0.1]], 0),
        ([[7.0], [np.nan, 8.0]], 0),  # nobody waits for what the schedule waits for by itself
        ([[0.02, np.nan], []], 30_000_000),  # more processes than sessions
    ],
)
def test_the_first_row_is_due_50_ms_after_the_start_or_when_the_schedule_says(
    scheduled_s, expected_ns
):
    assert lead_ns([np.array(instants) for instants in scheduled_s]) == expected_ns
