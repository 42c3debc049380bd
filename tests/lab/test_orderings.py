"""What each batching mode is for, shown on an 8B model on one H200: inequalities with room, on
several seeds, never single numbers."""

import numpy as np
import pytest

import slobench as sb
from loadgen.workload.scenario import scenario_from_flags

SEEDS = (7, 8, 9)


def interference(seed, **settings):
    """(p99 ITL of all, p99 TTFT of the short class), seconds."""
    scenario = sb.load_scenario(
        "long_prompt_interference",
        [f"seed={seed}", "phases.warmup=3s", "phases.measure=20s"],
    )
    summary = sb.summarize(sb.simulate(scenario, **settings))
    assert summary.counts["ok"] == summary.counts["due"]
    return (
        summary.metrics["itl_s"].percentiles["p99"].value,
        summary.classes["short"].metrics["ttft_s"].percentiles["p99"].value,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_chunking_ends_the_stalls_and_ordering_the_queue(seed):
    whole = interference(seed, mode="prefill_first")
    chunked = interference(seed, mode="chunked", token_budget=512)
    bucketed = interference(seed, mode="bucketed", token_budget=512)
    assert chunked[0] < 0.2 * whole[0]  # tokens flow on beside three documents a second
    assert chunked[1] > 0.5 * whole[1]  # and short prompts queue as before
    assert bucketed[0] < 0.2 * whole[0]
    assert bucketed[1] < 0.2 * chunked[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_at_the_scale_of_a_tiny_model_on_one_core(seed):
    """The measurement of `benchmarks/orderings.py`, here with the engine's cost model."""

    def seen(name, measure="8s", **settings):
        overrides = [f"seed={seed}", "phases.warmup=2s", f"phases.measure={measure}"]
        scenario = sb.load_scenario(name, overrides)
        return sb.summarize(sb.simulate(scenario, shape="tiny", hardware="cpu", **settings))

    def short_ttft_s(summary):
        return summary.classes["short"].metrics["ttft_s"].percentiles["p99"].value

    mixed = "long_prompt_interference_cpu"
    whole = seen(mixed, mode="prefill_first").metrics["itl_s"].percentiles["p99"].value
    chunked = seen(mixed, mode="chunked", token_budget=64)
    bucketed = seen(mixed, mode="bucketed", token_budget=64)
    assert chunked.metrics["itl_s"].percentiles["p99"].value < 0.2 * whole
    assert short_ttft_s(bucketed) < 0.2 * short_ttft_s(chunked)
    n_long = chunked.classes["long"].counts["ok"]
    assert n_long >= 8  # more than one long prompt a second
    uneven = "uneven_answers_cpu", "50s"  # a static batch takes 9 s
    static = seen(*uneven, mode="static").throughput.output_tokens_per_s
    continuous = seen(*uneven, mode="continuous").throughput.output_tokens_per_s
    assert continuous > 1.5 * static


@pytest.mark.parametrize("seed", SEEDS)
def test_leaving_and_entering_at_any_step_is_worth_half_as_much_again(seed):
    """Outputs U(50, 1000): rows of a static batch of 32 are masked after mean/max = 53 % of it."""
    scenario = scenario_from_flags(
        rate="1/s",
        input_len=256,
        output_len={"kind": "uniform", "min": 50, "max": 1000},
        duration="10s",
        seed=seed,
        overrides={
            "arrivals": {"kind": "burst", "requests": 256},
            "limits": {"timeout": "1h"},
            "phases": {"measure": "10s", "drain": "1h"},
        },
    )

    def tokens_per_s(**settings):
        rows = sb.simulate(scenario, **settings).request_rows
        return rows["output_tokens"].sum() / np.nanmax(rows["done_s"])

    static = tokens_per_s(mode="static", batch_size=32)
    assert tokens_per_s(mode="continuous", max_num_seqs=32) > 1.5 * static
    assert tokens_per_s(mode="continuous") > 4 * static  # the same with all the KV there is


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_of_equal_costs_loses_nothing_and_one_of_unequal_costs_loses_most(seed):
    """The figures of docs/equal-cost.md, at rates between the capacities of the modes."""

    def share_met(rate_per_s, lengths="1", limit="100ms", **settings):
        overrides = [f"seed={seed}", f"arrivals.rate={rate_per_s}/s", "phases.measure=8s"]
        overrides += [f"requests.output_tokens={lengths}", f"slo=[e2e <= {limit}]"]
        run = sb.simulate(sb.load_scenario("equal_cost", overrides), hardware="h200", **settings)
        return sb.summarize(run).attainment.value

    batches = {"mode": "dynamic", "max_batch_size": 32, "max_delay": "5ms"}
    assert share_met(600, **batches) > 0.99
    assert share_met(600, mode="continuous") > 0.99
    assert share_met(400, mode="static", batch_size=1) < 0.2
    assert share_met(900, **batches) < 0.9
    uneven = "{kind: uniform, min: 1, max: 99}", "2s"
    assert share_met(200, *uneven, mode="continuous") > 0.99
    assert share_met(200, *uneven, **batches) < 0.5
