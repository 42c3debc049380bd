"""Student's t, compared with scipy."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtri, stdtrit

from loadgen.measure.statistics.student_t import student_t


@given(st.floats(0.0001, 0.9999), st.floats(1, 5000))
def test_the_quantile_is_scipys(level, degrees):
    assert student_t(level, degrees) == pytest.approx(stdtrit(degrees, level), rel=1e-9, abs=1e-9)


def test_known_quantiles():
    """Of one degree tan(π (level − ½)), of two in closed form, of 30 from a printed table."""
    assert student_t(0.975, 1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-12)
    assert student_t(0.99995, 1) == pytest.approx(math.tan(0.49995 * math.pi), rel=1e-10)
    assert student_t(0.95, 2) == pytest.approx(0.9 / math.sqrt(2 * 0.95 * 0.05), rel=1e-12)
    assert student_t(0.975, 30) == pytest.approx(2.0423, abs=5e-5)
    assert student_t(0.025, 30) == pytest.approx(-2.0423, abs=5e-5)
    assert student_t(0.5, 7) == 0


def test_many_degrees_give_the_normal_quantile_and_none_no_number():
    assert student_t(0.975, math.inf) == pytest.approx(ndtri(0.975), rel=1e-12)
    assert student_t(0.975, 999.99) == pytest.approx(student_t(0.975, 1000.01), rel=1e-6)
    assert math.isnan(student_t(0.975, 0))
    assert math.isnan(student_t(0.975, math.nan))
