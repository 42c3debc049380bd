"""When a process without progress counts as stalled, and when the machine is the cause."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.stall_watch import ProcessUse, ProgressCounter, StallWatch, process_use
from loadgen.system.whole_file import CountedFile


def idle_s(looks):
    """The result after looks of (time, count, state, CPU seconds)."""
    watch = StallWatch()
    return [watch.look(now_s, count, ProcessUse(*use)) for now_s, count, *use in looks][-1]


def every_quarter(n, count=7, state="S", cpu_s=lambda k: 0.0, step_s=0.25):
    return [(100.0 + step_s * k, count, state, cpu_s(k)) for k in range(n + 1)]


@pytest.mark.parametrize("state", ["T", "S", "t", ""])
def test_a_stopped_or_waiting_process_is_charged_the_time_that_passed(state):
    assert idle_s(every_quarter(20, state=state)) == pytest.approx(5.0)


def test_an_endless_loop_is_charged_its_cpu_time():
    assert idle_s(every_quarter(20, state="R", cpu_s=lambda k: 0.25 * k)) == pytest.approx(5.0)


def test_a_process_without_cpu_time_is_charged_nothing():
    assert idle_s(every_quarter(4000, state="R")) == 0.0


def test_a_wait_for_a_disk_is_charged_nothing():
    assert idle_s(every_quarter(4000, state="D")) == 0.0


def test_a_step_ends_the_stall():
    looks = [*every_quarter(19), (105.0, 8, "S", 0.0)]
    assert idle_s(looks) == 0.0


def test_a_suspended_machine_is_charged_half_a_second():
    looks = [*every_quarter(2), (100.5 + 3600.0, 7, "S", 0.0)]
    assert idle_s(looks) == pytest.approx(1.0)


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 100.0), st.integers(0, 3), st.sampled_from("RSDT"), st.floats(0.0, 10.0)
        ),
        min_size=1,
        max_size=50,
    )
)
def test_nothing_is_charged_twice_or_before_the_last_step(steps):
    now_s, cpu_s, looks = 0.0, 0.0, []
    for step_s, count, state, used_s in steps:
        now_s, cpu_s = now_s + step_s, cpu_s + used_s
        looks.append((now_s, count, state, cpu_s))
    last = max(
        (k for k in range(1, len(looks)) if looks[k][1] != looks[k - 1][1]), default=0
    )  # the look that showed the last progress
    assert 0.0 <= idle_s(looks) <= now_s - looks[last][0] + 1e-6


def test_the_counter_is_shared_and_large_work_gets_more_time():
    counter = ProgressCounter.create()
    other = ProgressCounter(os.dup(counter.fd))
    other.advance()
    other.advance(8 << 20)
    assert counter.read() == (2, 2.0)
    other.advance()
    assert counter.read() == (3, 0.0)
    other.close()
    counter.close()


def test_each_megabyte_of_a_file_is_progress(tmp_path):
    steps = []
    with CountedFile(tmp_path / "part", lambda: steps.append(1)) as file:
        assert file.write(bytes(range(256)) * (5 << 11)) == 5 << 19
    assert len(steps) == 3  # 2.5 MiB
    assert (tmp_path / "part").read_bytes() == bytes(range(256)) * (5 << 11)


def test_a_process_that_has_ended_uses_nothing():
    assert process_use(os.getpid()).state == "R"
    assert process_use(2**22 + 1) == ("", 0.0)
