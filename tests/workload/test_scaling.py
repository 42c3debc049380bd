"""Scenarios with more or less of the same."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.workload.scaling import offered_load, scaled, with_window
from loadgen.workload.scenario import Scenario, load_scenario
from loadgen.workload.schedule import make_schedule
from tests import strategies


def scenario(arrivals, **more):
    return Scenario.model_validate(
        {
            "name": "asked",
            "arrivals": arrivals,
            "requests": {"input_tokens": 10, "output_tokens": 5},
            "phases": {"warmup": "10s", "measure": "90s"},
            **more,
        }
    )


def process(of) -> Any:
    return of.arrivals


@settings(deadline=None, max_examples=60)
@given(strategies.renewals | strategies.modulated, st.floats(0.01, 100))
def test_any_steady_process_is_scaled_to_any_rate(arrivals, level):
    asked = scenario(arrivals)
    assert offered_load(asked, "rate").is_steady
    found = scaled(asked, level, "rate")
    assert offered_load(found, "rate").level == pytest.approx(level, rel=1e-9)
    shape = process(found).model_dump(exclude={"rate"})
    assert shape == process(asked).model_dump(exclude={"rate"})


@pytest.mark.parametrize(
    "arrivals",
    [
        {"kind": "ramp", "from": "1/s", "to": "5/s", "over": "30s"},
        {"kind": "steps", "levels": [{"rate": "1/s", "for": "20s"}, {"rate": "4/s", "for": "80s"}]},
        {"kind": "curve", "points": [{"at": "0s", "rate": "0/s"}, {"at": "60s", "rate": "6/s"}]},
        {"kind": "diurnal", "rate": "3/s", "peak_to_trough": 4, "period": "60s"},
        {"kind": "flash_crowd", "rate": "2/s", "peak": "9/s", "at": "30s", "rise": "5s",
         "decay": "20s"},
    ],
)  # fmt: skip
def test_a_rate_that_varies_is_scaled_as_a_whole_and_keeps_its_window(arrivals):
    asked = scenario(arrivals)
    assert not offered_load(asked, "rate").is_steady
    found = scaled(asked, 7.0, "rate")
    assert process(found).mean_rate_per_s(100.0) == pytest.approx(7.0)
    half = process(asked).expected(50.0) / process(asked).expected(100.0)
    assert process(found).expected(50.0) / process(found).expected(100.0) == pytest.approx(half)


def test_a_sum_and_classes_with_their_own_arrivals_scale_together():
    parts = [{"kind": "poisson", "rate": "3/s"}, {"kind": "constant", "rate": "1/s"}]
    doubled = scaled(scenario({"kind": "sum", "of": parts}), 8.0, "rate")
    assert [part.rate for part in process(doubled).of] == [6.0, 2.0]
    asked = Scenario.model_validate(
        {
            "name": "two",
            "classes": {
                name: {
                    "arrivals": {"kind": "poisson", "rate": rate},
                    "requests": {"input_tokens": 10, "output_tokens": 5},
                }
                for name, rate in (("a", "1/s"), ("b", "3/s"))
            },
            "phases": {"measure": "60s"},
        }
    )
    assert offered_load(asked, "rate").level == 4.0
    found = scaled(asked, 2.0, "rate")
    assert [process(own).rate for own in found.classes.values()] == [0.5, 1.5]


def test_a_trace_is_played_faster_and_over_again(tmp_path):
    rows = [f"2024-01-01 00:00:{k:09.6f},{100 + k},{10}" for k in range(0, 60, 2)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    asked = scenario({"kind": "trace", "path": str(path), "format": {"kind": "azure"}})
    found = scaled(asked, 4 * offered_load(asked, "rate").level, "rate")
    n = len(make_schedule(found))
    assert n == pytest.approx(4 * len(make_schedule(asked)) * 100 / 60, rel=0.7)
    assert process(found).loop


def test_users_are_counted_in_whole_people():
    asked = load_scenario("closed_loop_users")
    assert offered_load(asked, "concurrency").level == 50
    assert process(scaled(asked, 7.0, "concurrency")).users == 7


@pytest.mark.parametrize(
    ("arrivals", "over", "said"),
    [
        ({"kind": "users", "users": 3, "think": "1s"}, "rate", "--over concurrency"),
        ({"kind": "burst", "requests": 9}, "rate", "no mean rate"),
        ({"kind": "poisson", "rate": "3/s"}, "concurrency", "--over rate"),
    ],
)
def test_what_cannot_be_scaled_is_refused_with_what_can(arrivals, over, said):
    with pytest.raises(UsageError, match=said):
        offered_load(scenario(arrivals), over)


def test_a_probe_has_its_own_window_and_seed():
    found = with_window(scenario({"kind": "poisson", "rate": "3/s"}), 2.5, 17.25, 99)
    assert (found.phases.warmup, found.phases.measure, found.seed) == (2.5, 17.25, 99)
