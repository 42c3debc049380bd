"""Replaying a trace: the rows that stand there, cut, thinned, rescaled and repeated."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadgen.errors import TraceFileError
from loadgen.records import FIRST_PIECE
from loadgen.workload.arrivals import ARRIVALS
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_schedule

SAMPLES = Path(__file__).parent.parent / "golden" / "traces"
SHARED = Path(os.environ.get("SLOBENCH_SHARED", "../shared")) / "traces"


def rng(seed=1):
    return np.random.Generator(np.random.PCG64(seed))


def replay(name="mooncake.jsonl", **keys):
    return ARRIVALS.build({"kind": "trace", "path": str(SAMPLES / name), **keys})


def test_a_replay_is_the_trace_row_by_row():
    traffic = replay().traffic(rng(), 100.0)
    assert traffic.scheduled_s.tolist() == [0.0, 1.2, 1.2, 2.7505, 3.0]
    assert traffic.input_tokens.tolist() == [1500, 1100, 600, 500, 1600]
    assert traffic.output_tokens.tolist() == [20, 30, 40, 50, 60]
    first = FIRST_PIECE
    assert traffic.prefix_id.tolist() == [first + 2, first + 1, first, 0, first + 2]
    assert traffic.prefix_tokens.tolist() == [1499, 1024, 512, 0, 1536]
    assert traffic.class_name is None


def test_rows_at_the_horizon_are_not_in_it():
    assert replay().times(rng(), 3.0).tolist() == [0.0, 1.2, 1.2, 2.7505]
    assert replay().times(rng(), 1.2).tolist() == [0.0]


def test_time_scale_multiplies_instants():
    assert replay(time_scale=0.5).times(rng(), 100.0).tolist() == [0.0, 0.6, 0.6, 1.37525, 1.5]


def test_a_window_is_cut_out_and_begins_at_zero():
    window = {"from": "1s", "to": "3s"}
    traffic = replay(window=window).traffic(rng(), 100.0)
    assert traffic.scheduled_s.tolist() == pytest.approx([0.2, 0.2, 1.7505])
    assert traffic.output_tokens.tolist() == [30, 40, 50]
    assert replay(window=window).mean_rate_per_s(2.0) == 1.5


def test_a_rate_is_met_exactly_over_whole_rounds():
    # 5 requests in 3.0 s · 5/4 = 3.75 s
    arrivals = replay(rate="10/s", loop=True)
    times_s = arrivals.times(rng(), 50.0)
    assert len(times_s) == 500
    assert arrivals.mean_rate_per_s(50.0) == pytest.approx(10)
    assert replay().mean_rate_per_s(3.75) == pytest.approx(5 / 3.75)


def test_a_loop_repeats_with_prefixes_of_its_own():
    traffic = replay(loop=True).traffic(rng(), 7.5)
    assert traffic.scheduled_s[5:] == pytest.approx([3.75, 4.95, 4.95, 6.5005, 6.75])
    first = FIRST_PIECE
    one, two = ([first + 2 + k, first + 1 + k, first + k, 0, first + 2 + k] for k in (0, 3))
    assert traffic.prefix_id.tolist() == one + two
    assert traffic.pieces["after"].tolist() == [0, first, first + 1, 0, first + 3, first + 4]
    assert traffic.output_tokens.tolist() == [20, 30, 40, 50, 60] * 2


def test_thinning_keeps_its_share_and_the_rows_together():
    # n = 50 000 rows kept with p = 0.2: standard deviation 0.0018; 4 sigma, false alarm 6e-5
    thinned = replay(thin="20%", loop=True).traffic(rng(), 3.75 * 10_000)
    assert len(thinned) / 50_000 == pytest.approx(0.2, abs=0.0072)
    length_of = {20: 1500, 30: 1100, 40: 600, 50: 500, 60: 1600}
    pairs = set(zip(thinned.output_tokens.tolist(), thinned.input_tokens.tolist(), strict=True))
    assert pairs == set(length_of.items())
    assert replay(thin="20%", loop=True).mean_rate_per_s(37.5) == pytest.approx(0.2 * 5 / 3.75)


@given(
    st.floats(0.5, 40), st.floats(0, 40), st.booleans(), st.sampled_from(["30%", "100%"]),
    st.sampled_from([{}, {"rate": "3/s"}, {"time_scale": 2.5}, {"window": {"from": "1s"}}]),
)  # fmt: skip
@example(15.0, 1.0, True, "100%", {"rate": "3/s"})  # 9 · (5/3) < 15 in floating point
def test_a_longer_horizon_only_adds(horizon_s, more_s, loop, thin, keys):
    arrivals = replay(loop=loop, thin=thin, **keys)
    short = arrivals.traffic(rng(), horizon_s)
    longer = arrivals.traffic(rng(), horizon_s + more_s)
    n = len(short)
    assert longer.scheduled_s[:n].tolist() == short.scheduled_s.tolist()
    assert longer.prefix_id[:n].tolist() == short.prefix_id.tolist()
    assert np.all(longer.scheduled_s[n:] >= horizon_s)
    assert np.all(np.diff(longer.scheduled_s) >= 0)


def test_classes_of_the_file_are_chosen_by_name():
    everything = replay("burstgpt_v1.csv").traffic(rng(), 1000.0)
    assert everything.class_name.tolist() == ["ChatGPT", "ChatGPT", "GPT-4"]
    gpt4 = replay("burstgpt_v1.csv", only=["GPT-4"]).traffic(rng(), 1000.0)
    assert gpt4.scheduled_s.tolist() == [40.5]
    with pytest.raises(TraceFileError, match=r"no class 'GPT4'; did you mean 'GPT-4'"):
        replay("burstgpt_v1.csv", only=["GPT4"]).traffic(rng(), 1000.0)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("sharegpt.json", {}, "sharegpt files have no times to replay"),
        ("mooncake.jsonl", {"window": {"to": "1h"}}, "window.to is after its end at 3.75s"),
        ("mooncake.jsonl", {"window": {"from": "1h"}}, "none of its 5 requests lies in the window"),
        ("nothing.csv", {}, "no such file"),
    ],
)
def test_what_cannot_be_replayed_is_refused(name, keys, message):
    with pytest.raises(TraceFileError, match=message):
        replay(name, **keys).traffic(rng(), 10.0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rate": "1/s", "time_scale": 2}, "both set the speed"),
        ({"window": {"from": "2s", "to": "1s"}}, "is empty"),
        ({"thin": "0%"}, "greater than 0"),
        ({"format": "azur"}, "did you mean 'azure'"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        replay(**keys)


SCENARIO = """
schema: 1
arrivals: {kind: trace, path: mooncake.jsonl, window: {to: 3.5s}, only: [], loop: true}
phases: {warmup: 1s, measure: 6s}
"""


def test_a_scenario_needs_nothing_but_the_trace(tmp_path, monkeypatch):
    monkeypatch.chdir(SAMPLES)  # paths start where slobench runs, wherever the scenario lies
    path = tmp_path / "replay.yaml"
    path.write_text(SCENARIO)
    scenario = load_scenario(path)
    rows = make_schedule(scenario)
    first_s = np.array([0, 1.2, 1.2, 2.7505, 3.0])
    assert rows["scheduled_s"] == pytest.approx(np.concatenate([first_s, first_s + 3.5]))
    assert rows["input_tokens"].tolist() == [1500, 1100, 600, 500, 1600] * 2
    assert rows["prefix_tokens"].tolist() == [1499, 1024, 512, 0, 1536] * 2
    assert rows["phase"].tolist() == [0] + [1] * 9
    again = tmp_path / "again.yaml"
    again.write_text(scenario.to_yaml())
    assert load_scenario(again) == scenario


def test_a_trace_without_prefixes_and_sessions_is_single_requests():
    arrivals = {"kind": "trace", "path": str(SAMPLES / "azure_2023.csv")}
    settings = {"arrivals": arrivals, "requests": {}, "phases": {"measure": "9s"}}
    rows = make_schedule(load_scenario("quickstart", settings))
    assert rows["input_tokens"].tolist() == [374, 396, 879, 91]
    assert rows["prefix_id"].tolist() == [0, 0, 0, 0]
    assert rows["session_id"].tolist() == [0, 1, 2, 3]


def test_rows_of_a_recorded_session_stay_together():
    arrivals = {"kind": "trace", "path": str(SAMPLES / "burstgpt_v2.csv")}
    settings = {"arrivals": arrivals, "requests": {}, "phases": {"measure": "9s"}}
    rows = make_schedule(load_scenario("quickstart", settings))
    assert rows["session_id"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("requests", "inputs", "prefixes", "outputs"),
    [
        ({"output_tokens": 7}, [1500, 1100, 600, 500, 1600], [1499, 1024, 512, 0, 1536], [7] * 5),
        # recorded prefixes are longer than 9 tokens
        ({"input_tokens": 9}, [9] * 5, [0] * 5, [20, 30, 40, 50, 60]),
        (
            {"shared_prefix": {"tokens": 100}},
            [1600, 1200, 700, 600, 1700],
            [100] * 5,
            [20, 30, 40, 50, 60],
        ),
    ],
)
def test_what_requests_name_goes_before_what_was_recorded(requests, inputs, prefixes, outputs):
    arrivals = {"kind": "trace", "path": str(SAMPLES / "mooncake.jsonl")}
    phases = {"measure": "10s"}
    settings = {"arrivals": arrivals, "requests": requests, "phases": phases}
    rows = make_schedule(load_scenario("quickstart", settings))
    assert rows["input_tokens"].tolist() == inputs
    assert rows["prefix_tokens"].tolist() == prefixes
    assert rows["output_tokens"].tolist() == outputs


def test_the_real_azure_hour_is_replayed_whole():
    path = SHARED / "AzureLLMInferenceTrace_code.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there (set SLOBENCH_SHARED to the folder that holds traces/)")
    arrivals = ARRIVALS.build({"kind": "trace", "path": str(path), "rate": "8819/h"})
    traffic = arrivals.traffic(rng(), 3600.0)
    assert len(traffic) == 8819
    assert traffic.input_tokens is not None
    assert traffic.input_tokens.sum() == pytest.approx(2047.9 * 8819, rel=0.01)
