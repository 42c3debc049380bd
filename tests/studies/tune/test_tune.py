"""Tune: successive halving, the candidates, and searches in the simulator."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.errors import UsageError
from loadgen.studies.modes.run import ModesSpec, compare
from loadgen.studies.modes.spec import Mode, read_modes
from loadgen.studies.tune.halving import Round, n_runs, paired, rounds, survivors
from loadgen.studies.tune.run import TUNE, tune
from loadgen.studies.tune.spec import TuneSpec, candidates, read_knobs
from loadgen.studies.tune.view import command, headline, lines, neighbours
from loadgen.workload.scenario import Scenario

QUIET = Console(quiet=True)
SLO = ("ttft <= 400ms", "tpot <= 14ms")


def traffic(*slo, rate="12/s"):
    """Prompts of 2 000 tokens on an 8B model: small pieces of them for TPOT, large for TTFT."""
    return Scenario.model_validate(
        {
            "schema": 1,
            "name": "traffic",
            "seed": 3,
            "arrivals": {"kind": "poisson", "rate": rate},
            "requests": {"input_tokens": 2000, "output_tokens": 60},
            "phases": {"warmup": "2s", "measure": "10s", "drain": "30s"},
            "slo": list(slo),
        }
    )


# --- halving


def test_the_rounds_of_sixteen_candidates_and_eight_seeds():
    found = rounds(16, 8)
    assert found == [Round(16, 1), Round(8, 2), Round(4, 4), Round(3, 8)]
    assert n_runs(found) == 16 + 8 + 8 + 12
    assert n_runs(found) / (16 * 8) < 0.4


@given(n=st.integers(1, 500), n_seeds=st.integers(1, 64))
def test_rounds_lose_candidates_gain_seeds_and_end_with_all_seeds(n, n_seeds):
    found = rounds(n, n_seeds)
    assert found[0].n_candidates == n
    assert (found[-1].n_candidates, found[-1].n_seeds) == (min(n, 3), n_seeds)
    for before, after in pairwise(found):
        assert after.n_candidates < before.n_candidates
        assert 1 <= before.n_seeds <= after.n_seeds
    assert n_runs(found) <= n * n_seeds


@pytest.mark.parametrize("n", range(12, 65))
def test_a_search_with_eight_seeds_takes_at_most_40_percent(n):
    assert n_runs(rounds(n, 8)) <= 0.4 * n * 8
    assert n_runs(rounds(n, 16)) <= 0.4 * n * 16


def test_the_highest_means_survive_and_of_equals_the_first():
    scores = {"a": [1.0, 2.0], "b": [2.0, 2.0], "c": [2.0, 1.0], "d": [0.0, 0.0]}
    assert survivors(scores, 3) == ["b", "a", "c"]
    assert list(paired([3.0, 5.0, 9.0], [1.0, 4.0])) == [2.0, 1.0]


def test_halving_finds_the_best_of_paired_scores_with_common_noise():
    """16 candidates with means 0 … 15, noise of the seed 30 times as large as of the candidate:
    paired, the best is always found (200 searches)."""
    rng = np.random.default_rng(5)
    for _ in range(200):
        table = np.arange(16.0)[:, None] + 30 * rng.normal(size=8) + rng.normal(size=(16, 8)) / 4
        kept = [str(k) for k in range(16)]
        for each in rounds(16, 8):
            kept = kept[: each.n_candidates]
            kept = survivors({k: table[int(k), : each.n_seeds].tolist() for k in kept}, len(kept))
        assert kept[0] == "15"


# --- candidates


def test_candidates_are_combinations_of_the_knobs_that_a_mode_has():
    spec = TuneSpec(
        traffic(*SLO),
        read_modes("chunked,continuous"),
        read_knobs(["token_budget=256,512", "max-num-seqs=8,16", "async_depth=0,1"]),
    )
    labels = [mode.label for mode in candidates(spec)]
    assert len(labels) == 8 + 4
    assert labels[0] == "chunked token_budget=256 max_num_seqs=8 async_depth=0"
    assert labels[-1] == "continuous max_num_seqs=16 async_depth=1"


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        (["token_budgets=1,2"], "no setting of these modes.*token_budget"),
        (["max_num_seqs=8,none"], "max_num_seqs"),
    ],
)
def test_a_knob_of_no_mode_and_a_wrong_value_are_mistakes(knobs, words):
    with pytest.raises(UsageError, match=words):
        candidates(TuneSpec(traffic(*SLO), read_modes("chunked"), read_knobs(knobs)))


@pytest.mark.parametrize("text", ["token_budget", "=1,2", "a=1,,2", "a=1,1"])
def test_a_malformed_knob_is_a_mistake(text):
    with pytest.raises(UsageError, match="--knob"):
        read_knobs([text])


def test_traffic_without_slo_is_a_mistake(tmp_path):
    with pytest.raises(UsageError, match="needs an SLO"):
        tune(TuneSpec(traffic(), read_modes("chunked"), {}), tmp_path, QUIET)


# --- searches


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A search of 14 candidates, and the goodput of all of them with all seeds, by `modes`."""
    knobs = read_knobs(["token_budget=128,256,512,1024,2048,4096", "max_num_seqs=4,64"])
    spec = TuneSpec(traffic(*SLO), read_modes("chunked,continuous"), knobs, n_seeds=8)
    directory = tmp_path_factory.mktemp("tune")
    result = tune(spec, directory, QUIET)
    everything = ModesSpec(spec.scenario, candidates(spec), n_seeds=8, n_workers=1)
    compared = compare(everything, tmp_path_factory.mktemp("all"), QUIET).result
    goodput: dict[str, list[float]] = {}
    for cell in compared.cells:
        assert cell.goodput.value is not None
        goodput.setdefault(cell.mode, []).append(cell.goodput.value)
    return spec, directory, result, goodput


def test_the_choice_is_the_best_of_the_exhaustive_grid_within_its_interval(searched):
    _, _, result, goodput = searched
    assert len(goodput) == 14
    best = max(goodput, key=lambda label: sum(goodput[label]))
    worst = min(goodput, key=lambda label: sum(goodput[label]))
    assert sum(goodput[best]) > 2 * sum(goodput[worst]), "the grid has something to find"
    lost = np.array(goodput[best]) - np.array(goodput[result.choice])
    half = 2.3646 * lost.std(ddof=1) / 8**0.5  # t of 7 degrees of freedom, 95 %
    assert lost.mean() <= half + 1e-12


def test_the_search_takes_at_most_40_percent_of_the_runs(searched):
    _, directory, result, _ = searched
    assert result.n_exhaustive == 14 * 8
    assert result.n_runs <= 0.4 * result.n_exhaustive
    n_confirmed = len(result.confirmed) * 8
    assert len([*(directory / "cells").iterdir()]) == result.n_runs + n_confirmed


def test_searched_and_confirmed_rows_are_those_of_the_cells(searched):
    _, _, result, goodput = searched
    assert result.seeds == [*range(3, 11)]
    assert result.confirmed_seeds == [*range(11, 19)]
    for row in result.searched:
        assert row.goodput.value == pytest.approx(np.mean(goodput[row.label][: row.goodput.n]))
    assert [row.label for row in result.searched[:3]] == result.rounds[-1].labels
    assert result.confirmed[0].label == result.choice
    assert result.confirmed[0].difference is None
    assert {row.label for row in result.confirmed} == {*result.rounds[-1].labels, "chunked"}


def test_the_choice_is_explained_by_paired_differences(searched):
    _, _, result, _ = searched
    text = "\n".join(lines(result))
    assert text.splitlines()[0] == headline(result)
    assert "chunked as it is" in text
    for row in neighbours(result):
        assert sum(row.parameters[k] != result.chosen.parameters[k] for k in row.parameters) == 1
    assert neighbours(result)
    assert command(result).startswith(f"slobench serve --mode {result.chosen.mode} --set ")


def test_a_resumed_search_runs_nothing_again(searched):
    spec, directory, result, _ = searched
    before = {path: path.stat().st_mtime_ns for path in (directory / "cells").iterdir()}
    assert tune(spec, directory, QUIET) == result
    assert {path: path.stat().st_mtime_ns for path in (directory / "cells").iterdir()} == before


def test_a_search_for_the_bundled_engine_simulates_it():
    spec = TuneSpec(traffic(*SLO), [Mode("chunked")], {}, "reference", {"shape": "tiny"})
    assert spec.simulated_settings == {"shape": "tiny", "hardware": "cpu"}
    on_h200 = TuneSpec(traffic(*SLO), [Mode("chunked")], {}, settings={"shape": "8b"})
    assert on_h200.simulated_settings == {"shape": "8b"}


def test_a_single_candidate_is_confirmed_and_stored(tmp_path):
    spec = TuneSpec(traffic(*SLO, rate="4/s"), [Mode("chunked")], {}, n_seeds=2)
    with TUNE.opened("one", tmp_path / "out") as place:
        result = tune(spec, place.directory, QUIET)
        place.write(result)
    assert TUNE.read(tmp_path / "out") == result
    assert (result.choice, result.n_runs, len(result.confirmed)) == ("chunked", 2, 1)
