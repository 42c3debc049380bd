"""The rule that ends a run whose server stopped answering."""

import pytest

from loadgen.measure.silence import is_silence
from loadgen.run.stop_rules import Silence


def silence_of(*beats, **fields):
    """The rule after messages of (now, in flight, time of the last byte)."""
    silence = Silence(**fields)
    for now_s, in_flight, heard_s in beats:
        silence.note(now_s, in_flight, heard_s)
    return silence


def quiet(begin_s, end_s, heard_s, in_flight=7):
    """Messages four times a second, without a byte after `heard_s`."""
    n = round((end_s - begin_s) * 4)
    return [(begin_s + (k + 1) / 4, in_flight, heard_s) for k in range(n)]


ANSWERING = [(k / 4, 3, k / 4) for k in range(1, 17)]  # until 4 s


@pytest.mark.parametrize(
    ("length_s", "longest_gap_s", "is_long"),
    [(10.0, 0.0, False), (10.1, 0.0, True), (10.1, 2.0, True), (14.9, 3.0, False),
     (15.1, 3.0, True)],
)  # fmt: skip
def test_a_silence_is_longer_than_ten_seconds_and_than_five_of_the_longest_gaps(
    length_s, longest_gap_s, is_long
):
    assert is_silence(length_s, longest_gap_s) is is_long


def test_a_frozen_server_ends_the_run_with_the_second_of_its_last_byte():
    assert silence_of(*ANSWERING, *quiet(4, 14, 4.0)).reason(7) is None
    assert silence_of(*ANSWERING, *quiet(4, 14.5, 4.0)).reason(7) == (
        "the server stopped answering at second 4: no byte came for 10.5 s, with 7 requests in "
        "flight"
    )


def test_any_byte_begins_anew_and_makes_the_rule_more_patient():
    slow = [*ANSWERING, *quiet(4, 9, 4.0), (9.25, 7, 9.25)]
    assert silence_of(*slow).longest_gap_s == 5.0
    assert silence_of(*slow, *quiet(9.25, 34, 9.25)).reason(7) is None
    assert silence_of(*slow, *quiet(9.25, 34.5, 9.25)).reason(7) is not None


def test_nobody_is_silent_while_nothing_is_in_flight():
    idle = [*ANSWERING, *quiet(4, 60, 4.0, in_flight=0)]
    assert silence_of(*idle).reason(0) is None
    assert silence_of(*idle).longest_gap_s == 0.0
    assert silence_of(*idle, *quiet(60, 70, 4.0)).reason(7) is None
    assert silence_of(*idle, *quiet(60, 70.5, 4.0)).reason(7) is not None


def test_a_server_that_never_answers_is_silent_from_its_first_request():
    assert silence_of(*quiet(0, 10.5, 0.0)).reason(7) == (
        "the server stopped answering at second 0: no byte came for 10.5 s, with 7 requests in "
        "flight"
    )


def test_the_preflight_and_the_slos_make_the_rule_patient():
    for fields in ({"longest_gap_s": 4.0}, {"limit_s": 20.0}):
        assert silence_of(*quiet(0, 20, 0.0), **fields).reason(7) is None
        assert silence_of(*quiet(0, 20.5, 0.0), **fields).reason(7) is not None


def test_a_machine_that_slept_did_not_see_a_silence():
    assert silence_of(*ANSWERING, (64.0, 7, 4.0)).quiet_s == 1.0


def test_a_worker_that_does_not_state_bytes_switches_the_rule_off():
    assert silence_of(*quiet(0, 60, None)).reason(7) is None


def test_a_silence_is_notable_before_it_ends_the_run():
    assert not silence_of(*ANSWERING, *quiet(4, 6, 4.0)).is_notable
    assert silence_of(*ANSWERING, *quiet(4, 6.25, 4.0)).is_notable
    assert not silence_of(*ANSWERING, *quiet(4, 6.25, 4.0), longest_gap_s=2.0).is_notable
