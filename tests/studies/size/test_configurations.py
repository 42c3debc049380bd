"""Configurations of a replica: their combinations and order by hand, and a search end to end."""

import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.errors import UsageError
from loadgen.studies.size.configurations import combinations, fewest, ranked, read_axes
from loadgen.studies.size.demand import Demand
from loadgen.studies.size.result import sentences
from loadgen.studies.size.run import SIZE, SizeSpec, size
from loadgen.studies.size.search import best_engine
from loadgen.workload.scenario import load_scenario
from tests.shown import tables

DEMAND = Demand(peak_per_s=40, headroom=0.2, survive=1, gpus_per_replica=1)
QUIET = Console(quiet=True)


def small():
    return load_scenario("capacity_search", ["phases.warmup=1s", "phases.measure=5s"])


def test_axes_are_keys_with_values():
    axes = read_axes(["tensor-parallel=1,2,2", "token_budget=512"])
    assert axes == {"tensor_parallel": ("1", "2"), "token_budget": ("512",)}


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["pipeline"], "expected KEY=VALUE,VALUE"),
        (["pipeline=1,,2"], "expected KEY=VALUE,VALUE"),
        (["pipeline=1", "pipeline=2"], "is given twice"),
        (["replicas=1,2"], "the peak decides"),
        (["hardware=h100,h200"], "search tensor_parallel"),
        (["tensor_parallel=0,1"], "numbers of GPUs"),
        (["a=1,2,3,4,5,6,7,8", "b=1,2,3,4,5,6,7,8", "c=1,2,3,4"], "256 combinations"),
    ],
)
def test_axes_of_another_form_are_refused(texts, words):
    with pytest.raises(UsageError, match=words):
        read_axes(texts)


def test_tensor_parallel_multiplies_the_hardware():
    axes = {"tensor_parallel": ("1", "4"), "pipeline": ("1", "2")}
    found = dict(combinations({"hardware": "h200", "shape": "70b"}, axes))
    assert list(found) == [
        "tensor_parallel=1 pipeline=1", "tensor_parallel=1 pipeline=2",
        "tensor_parallel=4 pipeline=1", "tensor_parallel=4 pipeline=2",
    ]  # fmt: skip
    last = {"hardware": "4xh200", "shape": "70b", "pipeline": "2"}
    assert found["tensor_parallel=4 pipeline=2"] == last
    with pytest.raises(UsageError, match="already several; name one"):
        list(combinations({"hardware": "2xh200"}, axes))


def test_configurations_are_ranked_by_goodput_per_gpu_draw_by_draw():
    """Two GPUs at 18 and 22 req/s are 9 and 11 each; one at 8 and 8.8 has 0.889 and 0.8 of it."""
    order = ranked(
        {"two": 2, "one": 1, "none": 8},
        {"one": {1: 8.0, 2: 8.8}, "two": {1: 18.0, 2: 22.0}},
        {"none": "does not fit"},
        DEMAND,
        0.95,
    )
    assert [each.settings for each in order] == ["two", "one", "none"]
    best, second, none = order
    assert best.goodput_per_gpu is not None
    assert best.goodput_per_gpu.value == pytest.approx((9 * 11) ** 0.5)
    assert second.best_over is not None
    assert second.best_over.value == pytest.approx((9 / 8 * 11 / 8.8) ** 0.5)
    # 48 req/s: 3 replicas of 19.9 and one that may fail are 8 GPUs; 6 of 8.39 and one are 7
    assert (best.gpus_at_peak, second.gpus_at_peak) == (8, 7)
    assert (none.gpus_at_peak, none.reason, best.best_over) == (None, "does not fit", None)
    assert fewest(order) is second


def test_a_search_sizes_the_configuration_with_the_best_goodput_per_gpu(tmp_path):
    """Four sequences at once serve less than 64; two GPUs serve less than twice as much as one; and
    the 70B model does not fit."""
    spec = SizeSpec(
        small(), DEMAND, None, "hardware=a100,shape=8b", attainment=0.9, n_schedules=1,
        budget_s=60.0, axes=read_axes(["tensor_parallel=1,2", "max_num_seqs=4,64"]),
    )  # fmt: skip
    with SIZE.opened("few", tmp_path / "out") as place:
        result = size(place, spec, QUIET)
    order = [each.settings for each in result.configurations]
    assert order[0] == "tensor_parallel=1 max_num_seqs=64"
    assert set(order) == {
        f"tensor_parallel={n} max_num_seqs={m}" for n in (1, 2) for m in (4, 64)
    }  # fmt: skip
    goodputs = [each.goodput_per_gpu for each in result.configurations]
    values = [goodput.value for goodput in goodputs if goodput is not None]
    assert values == sorted(values, reverse=True)
    assert result.demand.gpus_per_replica == 1
    assert result.capacity.low == pytest.approx(values[0], rel=0.2)
    assert SIZE.read(tmp_path / "out") == result
    lines = list(sentences(result))
    assert re.match(r"best of 4 configurations: tensor_parallel=1 max_num_seqs=64; \d+ %", lines[1])
    page = (tmp_path / "out" / "report.html").read_text()
    heads, rows = next(found for found in tables(page) if found[0][:1] == ["settings"])
    assert heads[1:] == ["GPUs", "goodput per GPU", "best over it", "GPUs at the peak"]
    assert [row[0] for row in rows] == order


def test_a_configuration_that_does_not_fit_is_listed_with_its_reason():
    engine, order = best_engine(
        small(), {"hardware": "h100", "shape": "70b"}, read_axes(["tensor_parallel=1,4"]), 0.9,
        DEMAND, 1, QUIET,
    )  # fmt: skip
    assert engine == "hardware=4xh100,shape=70b"
    assert [each.settings for each in order] == ["tensor_parallel=4", "tensor_parallel=1"]
    assert "weights do not fit" in order[1].reason


def test_a_search_without_a_configuration_that_fits_ends_with_the_reasons():
    axes = read_axes(["max_num_seqs=4,64"])
    with pytest.raises(UsageError, match=r"no configuration meets the SLO; max_num_seqs=4: .*fit"):
        best_engine(small(), {"hardware": "h100", "shape": "70b"}, axes, 0.9, DEMAND, 1, QUIET)


@pytest.mark.parametrize("more", ["--capacity=search", "--gpus-per-replica=2"])
def test_a_search_simulates_its_own_replicas(more, tmp_path):
    words = ["size", "capacity_search", "--peak=40/s", "--hardware=h200", "--search=pipeline=1,2"]
    failed = CliRunner().invoke(app, [*words, more, f"--out={tmp_path / 'out'}"])
    assert isinstance(failed.exception, UsageError)
    assert "leave out --capacity and --gpus-per-replica" in str(failed.exception)
    assert not (tmp_path / "out").exists()
