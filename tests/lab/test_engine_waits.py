"""Waits by reason of a real engine, from counters read during the run."""

from dataclasses import replace

import numpy as np

from loadgen.studies.modes.cell import read_waits
from tests.runs import measured_run


def scraped(*samples):
    """A run whose warm-up ends at 2 s, with (t_s, series_id, value) samples."""
    run = measured_run(n_requests=20)
    names = replace(
        run.names, series=("running", 'wait_s{reason="behind"}', 'wait_s{reason="no_seq_slot"}')
    )
    return replace(run, names=names, server_rows=np.array(list(samples), run.server_rows.dtype))


def test_waits_are_the_increase_of_the_counters_after_warm_up():
    run = scraped((1.0, 1, 3.0), (1.5, 0, 9.0), (2.0, 1, 4.0), (9.0, 1, 6.5), (9.0, 2, 1.25))
    assert read_waits(run) == {"": {"behind": 2.5, "no_seq_slot": 1.25}}


def test_a_server_without_the_counters_has_no_waits():
    assert read_waits(scraped((1.0, 0, 3.0))) == {}
    assert read_waits(measured_run(n_requests=20)) == {}
