"""How many processes a rate is given, and whose measurement of the machine is believed."""

import json

import pytest

from loadgen.run.cores import EVENTS_PER_CORE, known_ceiling, machine_name, workers_for


@pytest.mark.parametrize(
    ("tokens_per_s", "events_per_core", "cores", "quota", "workers"),
    [
        (1_000, 100_000, 8, None, 1),
        (50_000, 100_000, 8, None, 1),
        (50_001, 100_000, 8, None, 2),
        (50_001, 40_000, 8, None, 3),
        (1e9, 100_000, 8, None, 7),  # a core is left to the rest
        (1e9, 100_000, 8, 3.9, 2),
        (1e9, 100_000, 8, 0.5, 1),
        (0.0, 100_000, 1, None, 1),
    ],
)
def test_a_rate_gets_the_workers_it_needs_and_no_more_than_there_are_cores_for(
    tokens_per_s, events_per_core, cores, quota, workers
):
    assert workers_for(tokens_per_s, events_per_core, cores, quota) == workers


@pytest.mark.parametrize(
    ("told", "events_per_s"),
    [
        ({"events_per_s_per_core": 43210.5}, 43210.5),
        ({"events_per_s_per_core": 43210.5, "machine": "another"}, EVENTS_PER_CORE),
        ({"events_per_s_per_core": 0}, EVENTS_PER_CORE),
        ({"events_per_s_per_core": "many"}, EVENTS_PER_CORE),
        ({}, EVENTS_PER_CORE),
    ],
)
def test_the_ceiling_that_the_doctor_measured_on_this_machine_counts(tmp_path, told, events_per_s):
    file = {"machine": machine_name(), **told}
    (tmp_path / "ceiling.json").write_text(json.dumps(file))
    assert known_ceiling(tmp_path) == events_per_s


@pytest.mark.parametrize("text", ["", "[]", "{half", "null"])
def test_a_ceiling_file_that_can_not_be_read_is_none(tmp_path, text):
    (tmp_path / "ceiling.json").write_text(text)
    assert known_ceiling(tmp_path) == EVENTS_PER_CORE
    assert known_ceiling(tmp_path / "nowhere") == known_ceiling(None) == EVENTS_PER_CORE
