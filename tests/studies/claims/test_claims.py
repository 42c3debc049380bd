"""Claims: intervals of repeats, exact numbers, the catalogue, and a study of a few rows."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from loadgen.errors import UsageError
from loadgen.manifest.json_section import read_section
from loadgen.measure.statistics.intervals import EstimateSection
from loadgen.studies.claims import exact
from loadgen.studies.claims.catalog import CLAIMS, SOURCES, chosen
from loadgen.studies.claims.claim import (
    CapacityQuotient,
    Claim,
    Exact,
    Quotient,
    Recorded,
    Side,
    Untested,
)
from loadgen.studies.claims.numbers import is_inside, judged, repeat_interval
from loadgen.studies.claims.result import ClaimsFile
from loadgen.studies.claims.run import CLAIMS_STUDY, ClaimsSpec, measure
from loadgen.studies.claims.view import markdown, ours_text, statement_text, value_text
from loadgen.studies.claims.workloads import scenario_of
from loadgen.studies.modes.result import Quantities
from loadgen.studies.modes.spec import read_modes

ROOT = Path(__file__).parent.parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
QUIET = Console(quiet=True)
HALF = Claim(
    "half", "a system", "A", "50 %", "none", Exact(lambda: 0.5), "share", (0.4, 0.6), "Yes."
)


def share(value):
    return replace(HALF, measurement=Exact(lambda: value))


# --- intervals


def test_the_interval_of_a_repeat_is_wider_than_that_of_the_mean():
    """t = 4.3027 with two degrees of freedom: 2 ± 4.3027 · 1 · √(2/3)."""
    found = repeat_interval([1.0, 2.0, 3.0], 0.95, is_ratio=False)
    assert (found.value, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - 3.5131, abs=1e-4)
    assert found.high == pytest.approx(2 + 3.5131, abs=1e-4)


def test_ratios_are_averaged_as_logarithms():
    found = repeat_interval([2.0, 8.0], 0.95, is_ratio=True)
    assert found.value == pytest.approx(4.0)
    assert found.low is not None
    assert found.high is not None
    assert found.low * found.high == pytest.approx(16.0)


def test_a_single_value_has_no_interval_and_a_missing_value_leaves_none():
    assert repeat_interval([3.0], 0.95, is_ratio=False) == EstimateSection(value=3.0, n=1)
    for values in ([1.0, None], [1.0, float("inf")], [1.0, 0.0], []):
        assert repeat_interval(values, 0.95, is_ratio=True).value is None


def test_95_of_100_repeats_are_inside():
    """6 000 pairs of six normal values; the share is within 3 standard errors (0.9 %)."""
    draws = np.random.default_rng(11).normal(5.0, 1.0, (6000, 2, 6))
    inside = [
        is_inside(
            repeat_interval(list(first), 0.95, is_ratio=False),
            repeat_interval(list(second), 0.95, is_ratio=False).value,
        )
        for first, second in draws
    ]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.009)


# --- exact numbers


def test_exact_numbers_are_those_of_the_literature():
    assert exact.idle_slots((50, 200, 30, 150)) == 0.4625
    assert exact.idle_slots((128, 1024, 4096)) == pytest.approx(1 - 5248 / 12288)
    assert exact.in_flight(800, 3.2) == pytest.approx(4.876, abs=1e-3)
    assert exact.in_flight(7200, 0.4) == pytest.approx(5.486, abs=1e-3)
    assert exact.faster_than_memory() == pytest.approx(9.64, abs=0.01)


def test_the_optimum_gains_where_the_exact_queue_gains():
    """Mean latencies in ms, and weighted costs, of the published queue."""
    assert exact.affine_latency(0.7) == pytest.approx(4.9531 / 4.9536, abs=2e-5)
    assert exact.stairs_latency(0.7) == pytest.approx(5.703 / 13.182, rel=1e-3)
    assert exact.power_cost(0.3, 1.6) == pytest.approx(38.608 / 47.664, rel=1e-3)
    assert exact.power_over_limit(0.3, 1.6) == pytest.approx(1, abs=1e-3)


def test_memory_is_lost_in_the_last_block_or_in_the_reservation():
    assert exact._slots(15, 2, 0) == (31, 32)
    assert exact._slots(16, 2, 0) == (33, 48)
    assert exact._slots(15, 2, 100) == (31, 200)


def test_18_requests_are_of_the_order_of_what_fits_on_an_a6000():
    """(43.2 - 26.03 - 2.15) GB over 0.839 GB of KV each."""
    assert exact.requests_on_a6000() == 17


# --- the catalogue

SYSTEMS = (
    "continuous batching", "PagedAttention", "Orca", "static batching", "time window", "vLLM",
    "Sarathi", "FastGen", "BucketServe", "SMDP", "ARES", "POD-Attention", "HACK", "Nexus",
    "TensorRT-LLM", "SGLang", "DistServe", "FlashAttention", "VTC", "shortest job first",
    "priority", "quantisation", "pipeline", "load balancing", "phases", "predictive paging",
    "compression-aware", "preload", "reinforcement learning", "semantic", "TGI", "energy", "cost",
    "chat", "code generation", "writing", "batch processing", "70B", "13B", "state aggregation",
    "cross-cloud", "intent", "quantum", "edge", "fully automatic",
)  # fmt: skip


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_named_system_has_a_row(system):
    assert any(system in claim.system for claim in CLAIMS)


def test_rows_have_keys_of_their_own_known_sources_and_ordered_bounds():
    keys = [claim.key for claim in CLAIMS]
    assert len(set(keys)) == len(keys)
    for claim in CLAIMS:
        assert claim.source in SOURCES, claim.key
        assert claim.topic, claim.key
        low, high = claim.bounds
        if isinstance(claim.measurement, Untested):
            assert (low, high) == (None, None), claim.key
        else:
            assert low is not None, claim.key
            assert high is not None, claim.key
            assert low < high, claim.key


def test_every_side_is_a_workload_a_mode_and_a_quantity():
    for claim in CLAIMS:
        kind = claim.measurement
        if not isinstance(kind, Quotient | CapacityQuotient):
            continue
        for side in (kind.ours, kind.other):
            classes = set(scenario_of(side.workload, 3).classes)
            assert len(read_modes(side.mode)) == 1
        if isinstance(kind, Quotient):
            assert kind.quantity in Quantities.__struct_fields__, claim.key
            assert not kind.part or kind.part in classes, claim.key


def of_file(name):
    return json.loads((RESULTS / name).read_text())


def test_recorded_rows_are_those_of_the_stored_results():
    gpu, cpu = of_file("gpu-h200-2026-11-26.json"), of_file("orderings_cpu.json")
    experiments = gpu["parts"]["experiments"]["figures"]["experiments"]
    attention, parts = experiments["attention"], experiments["parts of a GPU"]
    goals = {goal["name"]: goal["value"] for goal in gpu["parts"]["decode_steps"]["goals"]}
    ratios = [tuple(row["ratios"]) for row in cpu["orderings"]]
    expected = {
        "cpu-continuous": ratios[0],
        "cpu-chunked-itl": ratios[2],
        "cpu-bucket-ttft": ratios[3],
        "gpu-kv-fp8": (attention["fp8"]["decode_s"] / attention["auto"]["decode_s"],),
        "gpu-pod": (attention["auto"]["one_launch_s"] / attention["auto"]["two_launches_s"],),
        "gpu-overlap": (max(part["together"] for part in parts),),
        "gpu-utilisation": (round(goals["decode step 8b, batch 256"], 3),),
    }
    recorded = {c.key: c.measurement for c in CLAIMS if isinstance(c.measurement, Recorded)}
    assert {key: kind.values for key, kind in recorded.items()} == expected
    readings = [gpu["parts"][part]["readings"] for part in ("throughput", "decode_steps")]
    large, small = (reading["power.draw"]["median"] for reading in readings)
    (energy,) = (c.measurement for c in CLAIMS if c.key == "energy")
    assert isinstance(energy, Quotient)
    assert energy.factor == pytest.approx(large / small, rel=0.01)


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UsageError, match=r"static-paddin.*static-padding"):
        chosen(["static-paddin"])


# --- judged rows


def test_a_statement_is_contradicted_by_any_set_of_seeds():
    assert judged(HALF, [[0.5], [0.59]], 0.95).holds is True
    row = judged(HALF, [[0.5], [0.61]], 0.95)
    assert row.holds is False
    assert statement_text(row) == "Yes. Holds 40 % to 60 %. CONTRADICTED here."


def test_repeats_inside_the_interval_are_counted():
    claim = replace(
        HALF, measurement=Quotient(Side("chat", "chunked"), Side("chat", "static"), "x")
    )
    row = judged(claim, [[0.50, 0.52], [0.55, 0.55], [0.9, 0.9]], 0.95)
    assert (row.repeats, row.n_inside) == ([0.55, 0.9], 1)
    assert judged(claim, [[0.5, None]], 0.95).method == "unfinished"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (2.914, "times", "2.91×"),
        (0.4, "change", "−60 %"),
        (1.85, "change", "+85 %"),
        (0.9999, "change", "−0.01 %"),
        (1.0, "change", "0 %"),
        (0.4625, "share", "46.2 %"),
        (17.0, "number", "17"),
        (None, "times", "–"),
    ],
)
def test_values_are_shown_in_their_unit(value, unit, text):
    assert value_text(value, unit) == text


# --- a study


def test_a_small_study_measures_and_resumes_without_a_further_simulation(tmp_path):
    sides = Side("short alone", "chunked:max_num_seqs=4"), Side("short alone", "chunked")
    quotient = replace(
        HALF,
        key="q",
        measurement=Quotient(*sides, "output_tokens_per_s"),
        unit="times",
        bounds=(None, 1),
    )
    spec = ClaimsSpec(claims=[quotient, share(0.5)], seed=3, n_seeds=2, n_sets=2)
    with CLAIMS_STUDY.opened("", tmp_path / "out") as place:
        result, was_interrupted = measure(spec, place.directory, QUIET)
        place.write(result)
    assert not was_interrupted
    assert result.seeds == [[3, 4], [5, 6]]
    first, second = result.rows
    assert first.holds
    assert first.value.value is not None
    assert 0 < first.value.value < 1
    assert (first.value.n, len(first.repeats)) == (2, 1)
    assert (second.value.value, second.method, second.holds) == (0.5, "computed", True)
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").iterdir()}
    assert len(cells) == 8  # two sides, two sets of two seeds
    with CLAIMS_STUDY.opened("", tmp_path / "out", resume=True) as place:
        again, _ = measure(spec, place.directory, QUIET)
    assert again == result == CLAIMS_STUDY.read(tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in cells} == cells


def test_a_contradicted_statement_is_named(tmp_path):
    result, _ = measure(ClaimsSpec(claims=[share(0.9)]), tmp_path, QUIET)
    assert result.contradicted == ["half"]
    assert ours_text(result.rows[0]) == "90 %, computed"


def test_the_documentation_is_the_stored_table():
    stored = read_section(of_file("claims.json"), ClaimsFile, "claims.json")
    assert (ROOT / "docs" / "claims.md").read_text() == markdown(stored)
    assert [row.key for row in stored.rows] == [claim.key for claim in CLAIMS]
    for row, claim in zip(stored.rows, CLAIMS, strict=True):
        words = (claim.claimed, claim.workload, claim.statement, *claim.bounds)
        assert (row.claimed, row.workload, row.statement, row.low_bound, row.high_bound) == words


def test_the_stored_table_is_repeated_and_holds():
    stored = of_file("claims.json")
    assert len(stored["seeds"]) == 3
    assert stored["n_inside"] >= 0.8 * stored["n_repeated"] > 0
    assert all(row["holds"] for row in stored["rows"] if row["method"] != "not tested")
