"""Canaries in the verdict: wrong answers under load, and what is chance."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.manifest.sections import CanarySection
from loadgen.measure.aggregate import summarize
from loadgen.measure.canary import wrong_answers
from loadgen.measure.measures import Measured, measure
from loadgen.measure.statistics.proportions import chance_of_more
from loadgen.studies.compare.numbers import compare
from tests.runs import measured_run, with_manifest

IDLE = {"same": 32}


def run_with(loaded, idle=IDLE, slo=("ttft <= 60s",), **fields):
    canary = CanarySection(share=0.02, prompts=8, idle=idle, loaded=loaded, **fields)
    return with_manifest(measured_run(slo=slo), canary=canary)


def test_the_lady_who_tastes_tea():
    """Fisher, The Design of Experiments (1935): 4 of 4 against 0 of 4, and 3 against 1."""
    assert chance_of_more(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert chance_of_more(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert chance_of_more(0, 4, 2, 4) == 1


@given(st.integers(0, 5), st.integers(0, 5), st.data())
def test_the_chance_is_that_of_all_ways_to_share_the_hits(n, other_n, data):
    hits, other = data.draw(st.integers(0, n)), data.draw(st.integers(0, other_n))
    ways = list(itertools.combinations(range(n + other_n), hits + other))
    as_many = sum(sum(place < n for place in way) >= hits for way in ways)
    assert chance_of_more(hits, n, other, other_n) == pytest.approx(
        float(Fraction(as_many, len(ways)))
    )


def test_a_swapped_model_is_found_and_never_met():
    run = run_with({"early": 30}, at_idle="one two", under_load="uno dos")
    summary = summarize(run)
    assert (summary.verdict, summary.reason_kinds) == ("no_verdict", ("wrong_answers",))
    assert summary.reasons[0] == (
        "30 of 30 canaries were answered otherwise under load than at idle (30 begin with other "
        "words); of the repeats at idle 0 of 32. At idle: 'one two'; under load: 'uno dos'. Check "
        "which model, replica and settings answered."
    )
    assert not any("canaries were answered" in text for text in summary.findings)


def test_a_missed_run_has_wrong_answers_as_a_finding():
    summary = summarize(run_with({"empty": 20, "repeating": 2}, slo=("ttft <= 1ms",)))
    assert summary.verdict == "missed"
    (found,) = (text for text in summary.findings if "canaries" in text)
    assert "(2 end in a loop, 20 are empty)" in found


def test_200_runs_of_a_server_whose_rounding_follows_its_batches_raise_no_alarm():
    """Each token may differ with 1 %: 4 % of the answers early, 24 % later. The first differing
    word decides, of 8 prompts in 4 waves at idle and 60 canaries under load."""
    rng = np.random.default_rng(49)

    def drawn(n):
        first = rng.geometric(0.01, n)  # differing word
        kinds = np.where(first <= 4, "early", np.where(first <= 32, "late", "same"))
        return {kind: int((kinds == kind).sum()) for kind in ("same", "late", "early")}

    alarms = [wrong_answers(run_with(drawn(60), drawn(32)).manifest) for _ in range(200)]
    assert alarms == [""] * 200
    swapped = [wrong_answers(run_with({"early": 30}, drawn(32)).manifest) for _ in range(200)]
    assert all(swapped)


def test_later_words_and_failures_alone_are_no_finding():
    assert wrong_answers(run_with({"late": 30, "failed": 10}).manifest) == ""
    assert wrong_answers(measured_run().manifest) == ""


def test_the_share_has_an_slo_of_its_own():
    slo = ("ttft <= 60s", "canary_match >= 90%")
    summary = summarize(run_with({"same": 57, "late": 3}, slo=slo))
    (match,) = (result for result in summary.slo if result.metric == "canary_match")
    assert (match.value, match.met, match.n, match.proven) == (0.95, True, 60, False)
    assert match.low is not None
    low, hits = match.low, range(57, 61)
    at_least_57 = sum(math.comb(60, k) * low**k * (1 - low) ** (60 - k) for k in hits)
    assert at_least_57 == pytest.approx(0.05)  # the definition of Clopper and Pearson
    assert summary.verdict == "met"
    assert summary.canaries == "57 of 60 as at idle (repeats at idle: 32 of 32)"
    assert summarize(run_with({"same": 50, "failed": 10}, slo=slo)).verdict == "missed"
    none = summarize(measured_run(slo=slo))
    assert (none.verdict, none.reason_kinds, none.canaries) == ("no_verdict", ("no_value",), "")


def test_the_share_can_be_compared():
    run = run_with({"same": 57, "late": 3})
    assert Measured(run).value(measure("canary_match")) == pytest.approx(0.95)
    assert np.isnan(Measured(measured_run()).value(measure("canary_match")))
    before, after = (
        [run_with({"same": 60 - k, "late": k}) for k in ks] for ks in ((0, 1, 0), (30, 29, 31))
    )
    found = compare(before, after, metrics=["canary_match"])
    assert found.verdict == "worse"
