"""The step delay: right on average, whatever the error of a single pause."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.lab.simulate import simulate
from loadgen.measure.aggregate import summarize
from loadgen.system.clock import VirtualClock
from reference_engine.executors.base import Caps
from reference_engine.executors.delayed import Delayed, StepDelay, delayed, parse_step_delay
from reference_engine.serving.serve_options import choose
from reference_engine.state.batch import StepBatch, StepResult


class Timed:
    """An executor with steps of the given durations on a clock; with `has_duration`, its results
    carry them."""

    caps = Caps()

    def __init__(self, clock, durations_s, has_duration):
        self.clock, self.durations_s, self.has_duration = clock, iter(durations_s), has_duration

    def execute(self, batch):
        duration_s = next(self.durations_s)
        self.clock.advance(duration_s)
        return StepResult(duration_s=duration_s if self.has_duration else None)


@given(
    durations_s=st.lists(st.floats(1e-5, 0.1), min_size=1, max_size=50),
    share=st.floats(0, 3),
    seconds=st.floats(0, 0.01),
    overshoot_s=st.floats(0, 1e-3),
    has_duration=st.booleans(),
)
def test_the_excess_of_pauses_is_compensated(
    durations_s, share, seconds, overshoot_s, has_duration
):
    clock = VirtualClock()

    def pause(duration_s):
        assert duration_s > 0
        clock.advance(duration_s + overshoot_s)

    timed = Timed(clock, durations_s, has_duration)
    under_test = Delayed(timed, StepDelay(share, seconds), clock, pause)
    reported_s = [under_test.execute(StepBatch()).duration_s or 0.0 for _ in durations_s]
    expected_s = sum(durations_s) * (1 + share) + seconds * len(durations_s)
    assert expected_s - 1e-9 <= clock.now_s() <= expected_s + overshoot_s + 1e-9
    if has_duration:
        assert sum(reported_s) == pytest.approx(expected_s)


def test_no_delay_leaves_the_executor_alone():
    clock = VirtualClock()
    executor = Timed(clock, [], has_duration=True)
    assert delayed(executor, StepDelay(), clock, clock.advance) is executor


@pytest.mark.parametrize(
    ("text", "share", "seconds"),
    [("10%", 0.1, 0.0), ("0%", 0.0, 0.0), ("2ms", 0.0, 0.002), ("150 %", 1.5, 0.0)],
)
def test_a_delay_is_a_share_or_a_duration(text, share, seconds):
    delay = parse_step_delay(text)
    assert delay.share == pytest.approx(share)
    assert delay.seconds == pytest.approx(seconds)
    assert parse_step_delay(str(delay)) == delay


@pytest.mark.parametrize("text", ["10", "-1%", "nan%", "1e9%", "fast", "-2ms"])
def test_other_values_are_rejected(text):
    with pytest.raises(ValueError, match=r"not a step delay|expected 0%"):
        parse_step_delay(text)
    with pytest.raises(UsageError, match="step_delay"):
        choose({}, [f"step_delay={text}"])


def test_a_simulated_engine_is_slower_by_the_delay_and_its_manifest_lists_it():
    plain, slower = (simulate("nightly_small", step_delay=delay) for delay in ("0%", "10%"))
    tpot_s = [summarize(run).metrics["tpot_s"].mean for run in (plain, slower)]
    assert tpot_s[1] / tpot_s[0] == pytest.approx(1.1, rel=1e-3)
    assert "step_delay=10%" in slower.manifest["target"]["labels"]["flags"]
