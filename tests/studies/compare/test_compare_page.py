"""The page of a comparison: every figure of the table, both distributions, nothing from outside."""

import json
import math
import re

import numpy as np
import pytest
import vl_convert

from loadgen.measure.measures import Measured
from loadgen.studies.compare.charts import ecdf, shifts
from loadgen.studies.compare.judgement import Options
from loadgen.studies.compare.numbers import judge_sides
from loadgen.studies.compare.page import figures, render
from loadgen.studies.compare.view import chance, change, row
from tests.runs import measured_run, with_manifest, with_reasoning


@pytest.fixture(scope="module")
def sides():
    return side(0, 0.01), side(1, 0.011)


def side(number, itl_s):
    runs = [measured_run(seed=10 * number + k, itl_s=itl_s) for k in range(3)]
    return [Measured(with_manifest(run, git=f"<b>{number}")) for run in runs]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.052, "s", "+5.2 %"),
        (-0.003, "share", "-0.3 points"),
        (1.99, "s", "+200 %"),
        (2.0, "per_s", "×3"),
        (21.2, "s", "×22"),
        (-0.97, "s", "-97 %"),
        (float("inf"), "per_s", "from 0"),
        (None, "s", "–"),
    ],
)
def test_a_change_is_signed_and_has_two_digits(value, unit, text):
    assert change(value, unit) == text


def test_the_page_holds_every_row_and_escapes_what_a_manifest_says(sides, cache):
    a, b = sides
    found = judge_sides(a, b, Options())
    page = render(found, a, b, Options(), cache)
    for one in found.measures:
        assert f'<th scope="row">{row(one)[0]}<' in page
    assert "WORSE" in page
    assert "<b>0" not in page
    assert "&lt;b&gt;0" in page
    outside = page.split("<script>")[0] + page.split("</script>")[-1]
    assert not re.findall(r'(?:src|href)="(?!#)', outside)
    (content,) = re.findall(r'id="figures">(.*?)</script>', page)
    specs = json.loads(content)
    assert set(specs) == {
        f"{k}-{m}" for k in ("shift", "ecdf") for m in ("ttft", "tpot", "itl", "e2e")
    }
    for spec in specs.values():
        assert vl_convert.vegalite_to_svg(spec).startswith("<svg")


def test_the_page_of_reasoning_servers_shows_ttfat_beside_ttft(sides):
    a, b = ([Measured(with_reasoning(m.run)) for m in side] for side in sides)
    assert list(figures(a, b, Options()))[:4] == [
        "shift-ttft", "ecdf-ttft", "shift-ttfat", "ecdf-ttfat"]  # fmt: skip


def test_the_shift_is_the_slow_down_at_every_percentile(sides):
    a, b = sides
    records = shifts("tpot_s", a, b, Options())
    assert [r["tail"] for r in records] == sorted(r["tail"] for r in records)
    assert np.median([r["change"] for r in records]) == pytest.approx(0.1, abs=0.02)
    assert all(r["low"] <= r["change"] <= r["high"] for r in records)


def test_the_ecdf_of_each_side_rises_to_one(sides):
    for side in "AB":
        shares = [r["share"] for r in ecdf("ttft_s", *sides) if r["side"] == side]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("p", "said"),
    [(math.nan, "–"), (0.0, "<0.001"), (4e-4, "<0.001"), (0.0496, "0.050"), (1, "1.000")],
)
def test_a_p_value_is_never_told_as_none(p, said):
    assert chance(p) == said
