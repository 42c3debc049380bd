"""Numbers as people read them."""

import math

import pytest

from loadgen.measure.catalog import Unit
from loadgen.measure.wording import format_count, format_number, format_share, format_value


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.4312, "s", "431 ms"),
        (0.9996, "s", "1 s"),
        (0.0000123, "s", "12.3 µs"),
        (-0.002, "s", "-2 ms"),
        (12.34, "per_s", "12.3/s"),
        (123456.0, "per_s", "123\u202f000/s"),
        (math.nan, "s", "–"),
        (None, "share", "–"),
        (math.inf, "s", "∞"),
        (math.inf, "per_s", "∞"),
    ],
)
def test_a_value_is_said_with_its_unit(value: float | None, unit: Unit, text: str) -> None:
    assert format_value(value, unit) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (0.00123, "0.123 %"),
        (0.0333, "3.33 %"),
        (0.5, "50 %"),
        (0.973, "97.3 %"),
        (0.9995, "99.95 %"),
        (0.99999, "99.999 %"),
        (1.0, "100 %"),
    ],
)
def test_shares_near_their_ends_keep_the_digits_that_matter(share: float, text: str) -> None:
    assert format_share(share) == text


def test_large_numbers_are_grouped_and_never_in_powers_of_ten() -> None:
    assert format_number(1234.5) == "1\u202f230"
    assert format_number(0.5) == "0.5"
    assert format_count(1234567) == "1\u202f234\u202f567"
