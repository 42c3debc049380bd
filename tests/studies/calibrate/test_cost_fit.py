"""Known answers of the fit: made-up steps of known costs come back, disturbed or not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.archive.request_names import namespace_of, request_name
from loadgen.errors import UsageError
from loadgen.records import CHUNKS, REQUESTS, SCHEDULE, Run
from loadgen.studies.calibrate.cost_fit import fit_cost
from loadgen.studies.calibrate.cost_forms import solved
from loadgen.studies.calibrate.lack_of_fit import Spells, middle_of, spells_of
from loadgen.studies.calibrate.step_samples import StepSamples, request_outside_s, samples_of_steps
from reference_engine.state.cost_model import StepCost, StepShape
from reference_engine.state.steps import StepEvent, StepRecord
from reference_engine.step_log.log_replay import EngineLog

TRUE = StepCost(
    step_s=0.9e-3,
    seq_s=30e-6,
    prefill_seq_s=0.4e-3,
    token_s=5e-6,
    context_token_s=0.11e-6,
    prefill_attention_s=0.02e-6,
)


def made_up(cost, n=4000, seed=1, noise=0.02, slow=0.0):
    """Steps of an engine with these costs; a share `slow` of them took 2 to 20 times as long."""
    rng = np.random.default_rng(seed)
    n_decode = rng.choice([0, 1, 2, 4, 8, 16, 32], n).astype(float)
    n_prefill = np.where((n_decode == 0) | (rng.random(n) < 0.3), rng.integers(1, 4, n), 0.0)
    lengths = rng.integers(8, 600, n).astype(float)
    prefill = n_prefill * lengths
    attention = n_prefill * lengths**2 / 2
    context = n_decode * rng.integers(20, 900, n)
    shapes = zip(n_prefill, prefill, attention, n_decode, context, strict=True)
    seconds = np.array([cost.estimate(StepShape(p + d, t, a, d, c)) for p, t, a, d, c in shapes])
    seconds = seconds * rng.lognormal(0, noise, n)
    is_slow = rng.random(n) < slow
    seconds[is_slow] *= rng.uniform(2, 20, is_slow.sum())
    return StepSamples(seconds, n_prefill, prefill, attention, n_decode, context, np.zeros(n))


@pytest.mark.parametrize("slow", [0.0, 0.1])
def test_known_costs_are_recovered_though_a_tenth_of_the_steps_is_slow(slow):
    fitted = fit_cost(made_up(TRUE, slow=slow))
    for shape in (
        StepShape(1, 0, 0.0, 1, 100),
        StepShape(32, 0, 0.0, 32, 20_000),
        StepShape(1, 16, 128.0, 0, 0),
        StepShape(3, 1700, 500_000.0, 0, 0),
        StepShape(10, 600, 90_000.0, 8, 4000),
    ):
        assert fitted.cost.estimate(shape) == pytest.approx(TRUE.estimate(shape), rel=0.05), shape
    assert fitted.request_s is None
    assert set(fitted.by_kind) == {"decode", "prompt", "mixed"}
    assert max(error.scatter for error in fitted.by_kind.values()) < 0.025
    assert max(error.high for error in fitted.by_kind.values()) < 0.01
    assert fitted.is_right


@pytest.mark.parametrize("n", [5, 256, 257, 3000])
def test_coefficients_of_exact_steps_come_back_however_many_there_are(n):
    table = np.random.default_rng(n).uniform(0, 1, (n, 3))
    assert solved(table, table @ [2.0, 0.0, 3.0]) == pytest.approx([2.0, 0.0, 3.0], abs=1e-6)


def test_least_squares_would_have_followed_the_slow_steps():
    """The reason for a robust fit: on the same steps, plain least squares is far off."""
    from scipy.optimize import nnls

    samples = made_up(TRUE, slow=0.1)
    ones, n_seqs = np.ones(len(samples)), samples.n_prefill + samples.n_decode
    terms = np.column_stack([ones, n_seqs, samples.prefill_tokens + samples.n_decode])
    plain, robust = nnls(terms, samples.seconds)[0], solved(terms, samples.seconds)
    assert abs(plain @ [1, 1, 1] / 0.935e-3 - 1) > 0.5
    assert abs(robust @ [1, 1, 1] / 0.935e-3 - 1) < 0.35


def test_a_floor_under_the_tokens_is_found():
    true = replace(TRUE, weights_s=256 * 20e-6, token_s=20e-6)
    cost = fit_cost(made_up(true)).cost
    assert cost.weights_s == pytest.approx(256 * 20e-6, rel=0.1)
    assert cost.token_s == pytest.approx(20e-6, rel=0.1)


def test_ordinary_noise_does_not_bias_the_total():
    """Errors relative to the measured time alone would make the costs 6 % too low."""
    fitted = fit_cost(made_up(TRUE, noise=0.2))
    assert abs(fitted.by_kind["decode"].bias) < 0.02
    assert fitted.cost.step_s == pytest.approx(TRUE.step_s, rel=0.04)


def test_time_in_no_cost_is_stated_as_bias():
    calm, slow = (fit_cost(made_up(TRUE, slow=share)).by_kind["decode"] for share in (0.0, 0.1))
    assert abs(calm.bias) < 0.01
    assert slow.bias < -0.3  # a tenth of the steps took eleven times as long on average


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 0.4), st.floats(0, 0.3))
def test_no_cost_is_negative_and_more_work_never_costs_less(seed, noise, slow):
    cost = fit_cost(made_up(TRUE, n=200, seed=seed, noise=noise, slow=slow)).cost
    shape = StepShape(5, 100, 5000.0, 4, 900)
    more = [
        shape._replace(prefill_tokens=200),
        shape._replace(context_tokens=1800),
        shape._replace(prefill_attention=9000.0),
        shape._replace(n_seqs=6, n_decode=5),
    ]
    assert min(cost.step_s, cost.seq_s, cost.token_s, cost.prefill_seq_s) >= 0
    assert min(cost.estimate(larger) for larger in more) >= cost.estimate(shape) > 0


def batches(seconds_of, n=6000, seed=3, noise=0.02):
    """Decodes of 1 to 32 requests at 100 tokens of context each, and their times by the batch."""
    rng = np.random.default_rng(seed)
    n_decode = rng.integers(1, 33, n).astype(float)
    seconds = seconds_of(n_decode) * rng.lognormal(0, noise, n)
    none = np.zeros(n)
    return StepSamples(seconds, none, none, none, n_decode, 100 * n_decode, none)


def batch_errors(fitted, seconds_of):
    sizes = [1, 2, 3, 5, 9, 12, 17, 24, 32]
    costs = [fitted.cost.estimate(StepShape(n, 0, 0.0, n, 100 * n)) for n in sizes]
    return [
        cost / float(seconds_of(np.array([n]))[0]) - 1 for n, cost in zip(sizes, costs, strict=True)
    ]


def roots(n):
    return 1e-3 + 4e-3 * np.sqrt(n)


def powers(n):
    return 5e-3 + 1e-3 * 2 ** np.ceil(np.log2(n))


@pytest.mark.parametrize(("seconds_of", "form"), [(roots, "pieces"), (powers, "powers_of_two")])
def test_a_batch_that_does_not_grow_linearly_gets_its_form(seconds_of, form):
    fitted = fit_cost(batches(seconds_of))
    assert fitted.form.batch == form
    assert fitted.is_right
    assert max(map(abs, batch_errors(fitted, seconds_of))) < 0.02


def test_jitter_is_no_error_of_the_costs():
    fitted = fit_cost(made_up(TRUE, noise=0.15))
    assert fitted.is_right
    assert min(error.scatter for error in fitted.by_kind.values()) > 0.08
    assert fitted.cost.step_s == pytest.approx(TRUE.step_s, rel=0.05)


def test_costs_that_are_wrong_at_a_single_size_are_refused_with_the_size():
    """Prompts above 400 tokens take 1.5 times as long; they are 2 % of the steps."""
    samples = made_up(TRUE, n=12_000)
    keep = (samples.n_decode > 0) | (np.arange(len(samples)) % 8 == 0)
    is_long = (samples.n_prefill > 0) & (samples.n_decode == 0) & (samples.prefill_tokens > 400)
    slow = replace(samples, seconds=samples.seconds * np.where(is_long, 1.5, 1.0)).at(keep)
    fitted = fit_cost(slow)
    assert not fitted.is_right
    assert abs(fitted.by_kind["prompt"].worst.error) > 0.08
    assert fitted.by_kind["prompt"].worst.by == "prompt_tokens"
    assert fitted.by_kind["decode"].error < 0.05


def test_a_server_that_slows_down_meanwhile_is_refused():
    samples = made_up(TRUE)
    growing = np.linspace(0.7, 1.3, len(samples))
    fitted = fit_cost(replace(samples, seconds=samples.seconds * growing))
    assert not fitted.is_right
    assert {error.worst.by for error in fitted.by_kind.values()} == {"time"}


def test_the_interval_holds_the_error_of_a_mean_in_spells():
    """50 runs of 200 values with a correlation of e^(−k/20): the root mean square of their means is
    that of the mean correlation, four times that of independent values."""
    rng = np.random.default_rng(5)
    kept = np.exp(-1 / 20)
    means, spells = [], []
    for _ in range(50):
        x = [rng.standard_normal()]
        for new in rng.standard_normal(2000) * np.sqrt(1 - kept**2):
            x.append(kept * x[-1] + new)
        means.append(np.mean(x[:200]))
        spells.append(spells_of(1 + 0.01 * np.array(x), np.zeros(len(x), dtype=int)))
    assert np.median([s.memory for s in spells]) == pytest.approx(20, rel=0.5)
    assert np.median([s.share for s in spells]) > 0.8
    # Σ over pairs of e^(−|i−j|/20) for 200 values is 0.181 of the square of their number
    assert Spells(1.0, 20.0).mean_correlation(np.arange(200)) == pytest.approx(0.181, rel=0.02)
    assert np.mean(np.square(means)) == pytest.approx(0.181, rel=0.4)
    assert Spells().mean_correlation(np.arange(200)) == pytest.approx(1 / 200)


def test_the_middle_of_ratios_ignores_a_pause():
    middle, influence = middle_of(np.array([0.9, 1.0, 1.1, 1.0, 0.95, 1.05, 8.0]))
    assert middle == pytest.approx(1.0, abs=0.05)
    assert influence.max() < 0.3


def test_the_time_of_a_request_is_separated_from_its_steps():
    samples = made_up(TRUE)
    alone = (samples.n_decode == 0) & (samples.n_prefill == 1)
    seconds = samples.seconds + 3e-3 * alone
    fitted = fit_cost(replace(samples, seconds=seconds, requests=alone.astype(float)))
    assert fitted.request_s == pytest.approx(3e-3, rel=0.1)


def test_too_few_steps_are_refused():
    with pytest.raises(UsageError, match="39 usable steps, at least 40"):
        fit_cost(made_up(TRUE, n=39))


def step_record(**values):
    """A step of nothing but these values."""
    empty = {"policy": "chunked", "action": "", "group": None, "items": (), "causes": ()}
    return StepRecord(**dict.fromkeys(StepRecord._fields, 0) | empty | values)


def test_a_step_with_decodes_lasts_from_the_end_of_the_step_before():
    steps = [
        step_record(t_s=1.0, end_s=1.5, n_prefill_tokens=10, n_running=1),
        step_record(t_s=1.6, end_s=1.9, n_decode=1, n_running=1, context_tokens=10),
        step_record(t_s=5.0, end_s=5.2, n_prefill_tokens=7, n_running=1),
        step_record(t_s=5.2, end_s=5.5, n_decode=1, padding_tokens=3),
        step_record(t_s=5.6, end_s=5.8, n_decode=1, n_prefill_tokens=4, items=(("a", 1), ("b", 4))),
    ]
    samples = samples_of_steps(steps)
    assert samples.seconds == pytest.approx([0.5, 0.4, 0.2, 0.3])
    assert samples.n_prefill.tolist() == [1, 0, 1, 1]
    assert samples.n_decode.tolist() == [0, 1, 0, 1]


def test_the_time_of_a_request_outside_the_steps_is_that_of_prompts_alone():
    """Prompts of 10 tokens: 0 alone in two pieces, 1 while 0 decodes, 2 with 4 cached tokens; 3
    arrives during a step; `other` is of no request of the run."""
    namespace = namespace_of("mine")
    names = [*(request_name(namespace, k) for k in range(4)), "other"]
    events = []
    for name, arrived_s, read_s, n_cached in zip(
        names, (1.0, 1.9, 5.0, 7.1, 9.0), (1.1, 1.95, 5.2, 7.5, 9.1), (0, 0, 4, 0, 0), strict=True
    ):
        sizes = {"n_prompt": 10, "arrived_s": arrived_s}
        events.append(StepEvent(read_s, 0, "arrival", request_id=name, detail=sizes))
        events.append(
            StepEvent(read_s + 5, 0, "finish", request_id=name, detail={"n_cached": n_cached})
        )
    steps = [
        step_record(t_s=1.2, end_s=1.5, n_prefill_tokens=8, n_running=1),
        step_record(t_s=1.5, end_s=1.7, n_prefill_tokens=2, n_running=1),
        step_record(t_s=1.7, end_s=1.8, n_decode=1, n_running=1),
        step_record(t_s=2.0, end_s=2.4, n_decode=1, n_prefill_tokens=10, n_running=2),
        step_record(t_s=5.3, end_s=5.7, n_prefill_tokens=6, n_running=1),
        step_record(t_s=7.0, end_s=7.4, n_decode=1, n_running=1),
        step_record(t_s=7.5, end_s=7.9, n_prefill_tokens=10, n_running=1),
        step_record(t_s=9.2, end_s=9.9, n_prefill_tokens=10, n_running=1),
    ]
    rows, schedule = np.zeros(4, REQUESTS), np.zeros(4, SCHEDULE)
    rows["request_id"] = schedule["request_id"] = np.arange(4)
    rows["sent_s"] = (0.9, 1.8, 4.9, 7.0)
    rows["first_token_s"] = (1.75, 2.6, 5.75, 8.0)  # a TTFT of 0.85, 0.8, 0.85 and 1 s
    run = Run(cast(Any, SimpleNamespace(run="mine")), schedule, rows, np.zeros(0, CHUNKS))
    log = EngineLog(steps, events)
    # 0: 0.85 s of which the steps from 1.2 to 1.7 are 0.5; 2: 0.85 − 0.4
    assert request_outside_s(run, log) == pytest.approx((0.35 + 0.45) / 2)
    assert request_outside_s(run, EngineLog(steps, events[2:4])) is None
