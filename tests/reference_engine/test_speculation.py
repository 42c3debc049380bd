"""Speculative decoding as a cost: arithmetic by hand, published acceptance, and runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.lab.compiled_core import NotCovered, core_settings
from loadgen.lab.sim_options import read_settings, sim_options
from loadgen.lab.simulate import simulate as simulate_scenario
from loadgen.lab.simulated_engine import build
from reference_engine.policies.chunked import Chunked
from reference_engine.simulator import simulate
from reference_engine.state.cost_model import Padding, StepCost, StepShape
from reference_engine.state.speculation import Draft, SpeculativeCost
from tests.reference_engine.engine_kit import request

TARGET = StepCost(step_s=1.0, token_s=0.1, context_token_s=0.001, prefill_attention_s=1e-4)
THREE = (0.5, 0.25, 0.25)  # a verification yields 2 tokens


def decodes(n, n_context):
    return StepShape(n, 0, 0.0, n, n_context)


def test_a_verification_yields_the_published_number_of_tokens():
    """EAGLE with k = 3: 0.77, 0.45 and 0.24 by position, a mean acceptance length of 2.46. Source:
    vllm-project/vllm#24344."""
    assert Draft((0.77, 0.45, 0.24)).n_accepted == pytest.approx(2.46)


def test_a_step_of_decodes_is_a_share_of_a_verification():
    """Two requests at 100 tokens of context: 8 tokens are verified in 1 + 0.8 + 0.1 s, and drafted
    in 3 · 0.2 s. Half of this per token."""
    cost = SpeculativeCost(TARGET, Draft(THREE, token_s=0.2))
    assert cost.estimate(decodes(2, 100)) == pytest.approx((1.9 + 0.6) / 2)


def test_a_model_that_drafts_takes_a_step_for_each_token():
    """A draft model of 0.1 s a step and 0.01 s a token: 3 · (0.1 + 0.02) s for two requests."""
    cost = SpeculativeCost(TARGET, Draft(THREE, cost=StepCost(step_s=0.1, token_s=0.01)))
    assert cost.estimate(decodes(2, 100)) == pytest.approx((1.9 + 0.36) / 2)
    # a prompt of 20 tokens: 1 + 2 + 0.02 s, and 0.1 + 0.2 s in the draft model
    assert cost.estimate(StepShape(1, 20, 200.0)) == pytest.approx(3.02 + 0.3)


def test_prompts_delay_the_decodes_by_their_whole_time():
    """The prompt of the step before adds 2 + 0.02 s to the verification, which are not divided."""
    cost = SpeculativeCost(TARGET, Draft(THREE))
    mixed = StepShape(3, 20, 200.0, 2, 100)
    assert cost.estimate(mixed) == pytest.approx(1.9 / 2 + 2.02)


def test_padding_is_verified_too():
    cost = SpeculativeCost(TARGET, Draft(THREE))
    padded = StepShape(1, 0, 0.0, 1, 50, Padding(decode_rows=1, decode_context_tokens=50))
    assert cost.estimate(padded) == cost.estimate(decodes(2, 100))


@given(st.integers(0, 64), st.integers(0, 512), st.integers(0, 8192))
def test_a_draft_that_is_never_accepted_never_saves_time(n, n_prompt, n_context):
    shape = StepShape(n + bool(n_prompt), n_prompt, n_prompt**2 / 2, n, n * n_context)
    costs = [SpeculativeCost(TARGET, Draft(acceptance)) for acceptance in ((0.0, 0.0), ())]
    never, none = (cost.estimate(shape) for cost in costs)
    assert never >= none - 1e-9
    assert none == pytest.approx(TARGET.estimate(shape))


def test_an_answer_takes_the_verifications_of_its_tokens():
    """A prompt of 10 tokens and 8 more tokens at no cost of context: 1 + 1 s, then 8 / 2
    verifications of 4 tokens, 1 + 0.4 s each."""
    target = StepCost(step_s=1.0, token_s=0.1)
    alone = request("a", [1] * 10, 9)
    done = simulate([alone], Chunked(), SpeculativeCost(target, Draft(THREE)))
    assert done.finished[0].finished_s == pytest.approx(2.0 + 4 * 1.4)


def test_drafts_shorten_the_answers_of_a_run_and_python_computes_it():
    speeds = {}
    for acceptance in ("", "77% 45% 24%"):
        more = {"draft_acceptance": acceptance, "draft_step": "0.4ms"} if acceptance else {}
        run = simulate_scenario("quickstart", shape="8b", num_prompts=40, **more)
        rows = run.request_rows
        tpot_s = (rows["last_token_s"] - rows["first_token_s"]) / (rows["output_tokens"] - 1)
        speeds[acceptance] = 1 / float(tpot_s.mean())
        assert run.manifest.engine is not None
        if acceptance:
            assert run.manifest.engine.core.startswith("python: costs of another kind")
    assert 1.8 < speeds["77% 45% 24%"] / speeds[""] < 2.46


def test_a_draft_model_takes_memory():
    """8B leaves 110.8 GB of an H200, 1B takes 2.47 GB of weights, and 32 KiB of KV for a token
    beside the 128 KiB of 8B."""
    options = sim_options(read_settings("draft_acceptance=80% 60%,draft_shape=1b,kv_dtype=auto"))
    engine = build(options, is_sharing=False)
    (replica,) = engine.simulator.replicas
    assert replica.state.kv.n_blocks * 16 == pytest.approx(108.36e9 / 163_840, rel=1e-3)
    assert "2 drafted tokens of 1b, accepted 80% 60%" in engine.description
    with pytest.raises(NotCovered):
        core_settings(engine, options.cluster)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("draft_step=1ms", "draft_step: has no effect without draft_acceptance"),
        ("draft_acceptance=50% 60%", "the shares must not rise"),
        ("draft_acceptance=120%", "draft_acceptance"),
        ("draft_acceptance=50%,pipeline=2", "not simulated together with pipeline"),
        ("draft_acceptance=50%,split=50%", "not simulated together with pipeline or split"),
        ("draft_acceptance=50%,shape=nano,hardware=cpu", "are those of its drafts"),
        ("draft_acceptance=50%,draft_shape=70b,shape=8b,hardware=h200", "do not fit"),
        ("draft_acceptance=50%,draft_shape=8b,shape=70b,hardware=2xh100", "do not fit|no memory"),
    ],
)
def test_a_draft_that_cannot_be_simulated_is_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        build(sim_options(read_settings(settings)), is_sharing=False)
