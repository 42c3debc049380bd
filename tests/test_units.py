"""Units: what people write becomes SI floats, and is written back exactly."""

import math
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, PlainSerializer
from pydantic_core import PydanticSerializationError

from loadgen.cli.exit_codes import INTERRUPTED, guarded
from loadgen.fields import as_data
from loadgen.units import (
    format_duration,
    parse_duration_s,
    parse_level_per_s,
    parse_rate_per_s,
    parse_share,
    write_duration,
    write_level,
    write_rate,
    write_share,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1.5s", 1.5),
        ("5m", 300.0),
        ("5min", 300.0),
        ("1h30m", 5400.0),
        ("1 h 30 min", 5400.0),
        ("2d", 172_800.0),
        (" 20 s ", 20.0),
        ("250us", 250e-6),
        ("250µs", 250e-6),
        (".5s", 0.5),
        ("1e3ms", 1.0),
        ("0s", 0.0),
    ],
)
def test_durations_are_read_in_seconds(text, seconds):
    assert parse_duration_s(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (5, "write '5s' or '5ms', not 5"),
        (0.5, "write '0.5s'"),
        (True, "needs its unit"),
        (None, "needs its unit"),
        ("5", "is not a duration"),
        ("", "is not a duration"),
        ("-1s", "cannot be negative"),
        ("1h-30m", "cannot be negative"),
        ("5 sec", "units: ns, us"),
        ("s", "is not a duration"),
        ("1e999s", "is not a duration"),
        ("nan s", "is not a duration"),
        ("5s please", "is not a duration"),
    ],
)
def test_what_is_no_duration_is_refused_with_an_example(wrong, said):
    with pytest.raises(ValueError, match=said):
        parse_duration_s(wrong)


@pytest.mark.parametrize(
    ("text", "per_s"),
    [("12/s", 12.0), ("30/min", 0.5), ("30/m", 0.5), ("0.5 req/s", 0.5), ("900 tok/s", 900.0)],
)
def test_rates_are_read_per_second(text, per_s):
    assert parse_rate_per_s(text) == per_s


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (12, "write '12/s', not 12"),
        ("12", "is not a rate"),
        ("0/s", "must be positive"),
        ("-1/s", "must be positive"),
        ("1e999/s", "must be positive"),
        ("12/fortnight", "is not a rate"),
        ("12s", "is not a rate"),
        ("/s", "is not a rate"),
    ],
)
def test_what_is_no_rate_is_refused_with_an_example(wrong, said):
    with pytest.raises(ValueError, match=said):
        parse_rate_per_s(wrong)


def test_one_level_of_a_varying_rate_may_be_silence():
    assert parse_level_per_s("0/s") == 0.0
    assert parse_level_per_s("30/min") == 0.5
    assert write_level(0.0) == "0/s"
    assert write_level(12.0) == "12/s"
    with pytest.raises(ValueError, match="must be positive, or '0/s' for silence"):
        parse_level_per_s("-1/s")


@pytest.mark.parametrize(
    ("text", "share"), [("2%", 0.02), (0.02, 0.02), ("0.02", 0.02), ("100%", 1.0), (0, 0.0)]
)
def test_shares_are_fractions_or_per_cent(text, share):
    assert parse_share(text) == share


@pytest.mark.parametrize("wrong", ["101%", "-1%", 2, "50", "half", "nan", True, None])
def test_what_is_no_share_is_refused(wrong):
    with pytest.raises(ValueError, match="is not a share"):
        parse_share(wrong)


@given(st.floats(0, 1e9, allow_subnormal=False))
def test_a_duration_written_reads_back_exactly(seconds):
    assert parse_duration_s(write_duration(seconds)) == seconds


@given(st.floats(1e-9, 1e9))
def test_a_rate_written_reads_back_exactly(per_s):
    assert parse_rate_per_s(write_rate(per_s)) == per_s


@given(st.floats(0, 1))
def test_a_share_written_reads_back_exactly(share):
    assert parse_share(write_share(share)) == share


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "500ms"), (1.5, "1.5s"), (20.0, "20s"), (300.0, "5m"), (3600.0, "1h"), (0.0, "0s")],
)
def test_durations_are_written_as_people_would(seconds, text):
    assert write_duration(seconds) == text


@pytest.mark.parametrize(("per_s", "text"), [(12.0, "12/s"), (0.5, "0.5/s"), (1 / 3, "20/min")])
def test_rates_are_written_as_people_would(per_s, text):
    assert write_rate(per_s) == text


@pytest.mark.parametrize(("share", "text"), [(0.02, "2%"), (0.5, "50%"), (0.995, "99.5%")])
def test_shares_are_written_in_per_cent(share, text):
    assert write_share(share) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (4.2e-5, "42 µs"),
        (1.0, "1 s"),
        (90.0, "90 s"),
        (600.0, "10 min"),
        (10_800.0, "3 h"),
        (math.nan, "–"),
        (math.inf, "∞"),
    ],
)
def test_durations_are_shown_in_the_unit_that_keeps_them_readable(seconds, text):
    assert format_duration(seconds) == text


def test_ctrl_c_while_a_model_is_written_is_ctrl_c():
    def pressed(_value):
        raise KeyboardInterrupt

    class Inner(BaseModel):
        at: Annotated[float, PlainSerializer(pressed)] = 1.0

    class Outer(BaseModel):
        inner: Annotated[Inner, PlainSerializer(as_data)] = Inner()

    with pytest.raises(KeyboardInterrupt):
        as_data(Outer())
    with pytest.raises(PydanticSerializationError) as raised:
        Outer().model_dump()
    assert guarded(lambda: (_ for _ in ()).throw(raised.value), {}) == INTERRUPTED
