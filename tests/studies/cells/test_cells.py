"""Cells: their order, what is kept of them and what is refused; simulated, so that no server is
needed."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell, check_cells, definition, differing
from loadgen.studies.cells.order import run_cells, turns
from loadgen.studies.cells.runner import Between, CellFailure, CellRun, repeated
from loadgen.workload.scenario import load_scenario

SHORT = ["phases.warmup=0s", "phases.measure=2s"]
ENGINE = "shape=8b,hardware=h200"
CACHE: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def _cache(page_cache):
    CACHE["dir"] = page_cache


def cell(name, rate="4/s", target="sim", engine=ENGINE, **options):
    scenario = load_scenario("quickstart", [*SHORT, f"arrivals.rate={rate}"])
    return Cell(
        name,
        scenario,
        target,
        RunOptions(engine=engine, cache_dir=CACHE.get("dir"), **options),
        {"rate": rate},
    )


def quiet():
    return Console(file=io.StringIO(), width=200)


def all_of(cells, directory, repeats=1, console=None, **more):
    return list(run_cells(cells, directory, repeats=repeats, console=console or quiet(), **more))


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=5)  # cells on each of several servers


def on_servers(shape):
    one = cell("one")
    return [
        replace(one, name=f"s{server}c{k}", options=RunOptions(engine=f"seed={server}"))
        for server, n in enumerate(shape)
        for k in range(n)
    ]


@given(SHAPES, st.integers(1, 5), st.integers(0, 2**31))
def test_every_cell_has_its_turn_before_any_has_its_second(shape, repeats, seed):
    cells = on_servers(shape)
    found = turns(cells, Path("d"), repeats=repeats, order_seed=seed)
    n = len(cells)
    for k in range(repeats):
        turn = found[k * n : (k + 1) * n]
        assert {t.cell.name for t in turn} == {c.name for c in cells}
        assert {t.repeat for t in turn} == {k + 1}
    assert len({t.directory for t in found}) == n * repeats


@given(SHAPES, st.integers(1, 3), st.integers(0, 2**31))
def test_a_linear_drift_adds_the_same_to_every_cell(shape, n_pairs, seed):
    found = turns(on_servers(shape), Path("d"), repeats=2 * n_pairs, order_seed=seed)
    drift: Counter[str] = Counter()
    for at, turn in enumerate(found):
        drift[turn.cell.name] += at
    assert len(set(drift.values())) == 1


@given(SHAPES, st.integers(1, 4), st.integers(0, 2**31))
def test_a_server_is_started_once_a_round_and_kept_over_the_turning_point(shape, repeats, seed):
    found = turns(on_servers(shape), Path("d"), repeats=repeats, order_seed=seed)
    keys = [turn.cell.server_key for turn in found]
    n_starts = 1 + sum(a != b for a, b in itertools.pairwise(keys))
    n_odd_rounds = (repeats + 1) // 2
    assert n_starts <= repeats * len(shape) - (repeats - n_odd_rounds)


def with_controls(shape):
    cells = on_servers(shape)
    beside = {c.name: replace(c, name=f"{c.name}.control", server="control") for c in cells}
    return cells, beside


@pytest.mark.parametrize("stays_up", [True, False])
def test_the_server_of_a_control_stays_up_where_it_may(stays_up):
    cells, beside = with_controls([2])
    beside = {name: replace(one, stays_up=stays_up) for name, one in beside.items()}
    for turn in turns(cells, Path("d"), repeats=2, controls=beside):
        name = turn.cell.name
        partner = name.removesuffix(".control") if ".control" in name else f"{name}.control"
        assert (turn.up_beside.name if turn.up_beside else None) == (partner if stays_up else None)


def test_servers_of_a_pair_start_anew_for_every_second_one():
    cells, beside = with_controls([1])
    beside = {name: replace(one, stays_up=True) for name, one in beside.items()}
    found = turns(cells, Path("d"), repeats=4, controls=beside)
    assert [turn.repeat for turn in found] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert [turn.starts_anew for turn in found] == [True, False, False, False] * 2
    assert not any(turn.starts_anew for turn in turns(cells, Path("d"), repeats=2))


@given(SHAPES, st.integers(1, 3), st.integers(0, 2**31))
def test_a_control_stands_right_beside_its_cell_now_before_and_now_after_it(shape, n_pairs, seed):
    cells, beside = with_controls(shape)
    found = turns(cells, Path("d"), repeats=2 * n_pairs, order_seed=seed, controls=beside)
    place = {(turn.cell.name, turn.repeat): at for at, turn in enumerate(found)}
    assert len(place) == 2 * len(cells) * 2 * n_pairs
    for cell in cells:
        after = [
            place[cell.name, k + 1] - place[f"{cell.name}.control", k + 1]
            for k in range(2 * n_pairs)
        ]
        assert set(map(abs, after)) == {1}
        for first, second in zip(after[::2], after[1::2], strict=True):
            assert first == -second
    starts = sum(a.cell.server_key != b.cell.server_key for a, b in itertools.pairwise(found))
    assert starts < 2 * len(cells) * 2 * n_pairs
    if len(cells) == 1:  # control, cell; cell, control; …
        assert starts == 2 * n_pairs


def test_the_order_is_shuffled_but_the_same_every_time():
    cells = on_servers([1] * 8)
    orders = {
        tuple(t.cell.name for t in turns(cells, Path("d"), repeats=1, order_seed=seed))
        for seed in (0, 0, 1, 2, 3)
    }
    assert len(orders) == 4


def test_repeats_draw_other_requests_and_cells_of_one_scenario_the_same(tmp_path):
    cells = [cell("a"), cell("b", engine=f"{ENGINE},mode=static")]
    found = all_of(cells, tmp_path, repeats=2)
    assert {(f.cell.name, f.repeat) for f in found} == {("a", 1), ("a", 2), ("b", 1), ("b", 2)}
    schedules = {(f.cell.name, f.repeat): f.run.manifest.schedule_sha256 for f in found}
    assert schedules["a", 1] == schedules["b", 1]
    assert schedules["a", 2] == schedules["b", 2]
    assert schedules["a", 1] != schedules["a", 2]
    assert {f.run.manifest.run for f in found} == {"a-r1", "a-r2", "b-r1", "b-r2"}
    assert all((f.directory / "report.html").is_file() for f in found)
    assert repeated(cells[0].scenario, 1) == cells[0].scenario


def test_the_seed_wraps_around_where_it_ends():
    last = load_scenario("quickstart", [f"seed={2**63 - 1}"])
    assert repeated(last, 2).seed == 0


def test_what_is_finished_is_read_and_not_run_again(tmp_path):
    first = all_of([cell("a"), cell("b")], tmp_path, repeats=2)
    again = all_of([cell("a"), cell("b")], tmp_path, repeats=3)
    assert [f.was_reused for f in first] == [False] * 4
    assert {(f.cell.name, f.repeat) for f in again if not f.was_reused} == {("a", 3), ("b", 3)}
    found = {(f.cell.name, f.repeat): f.summary.to_json() for f in again}
    assert all(found[f.cell.name, f.repeat] == f.summary.to_json() for f in first)


@pytest.mark.parametrize("text", ["", "[1.0, 2", "7", "[null]", '["fast"]'])
def test_what_the_gauge_said_may_be_damaged(tmp_path, text):
    all_of([cell("a")], tmp_path)
    path = tmp_path / "a" / "r1" / "pace.json"
    path.write_text("[1.0, 2.0]\n")
    (whole,) = all_of([cell("a")], tmp_path)
    assert whole.paces == (1.0, 2.0)
    path.write_text(text)
    console = quiet()
    (damaged,) = all_of([cell("a")], tmp_path, console=console)
    assert damaged.was_reused
    assert damaged.paces == ()
    assert f"{path} cannot be read" in console.file.getvalue()


@pytest.mark.parametrize("left", ["interrupted", "running"])
def test_an_unfinished_run_is_moved_aside_and_made_again(tmp_path, left):
    all_of([cell("a")], tmp_path)
    path = tmp_path / "a" / "r1" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"ended": left}))
    console = quiet()
    (again,) = all_of([cell("a")], tmp_path, console=console)
    assert not again.was_reused
    assert again.run.manifest.ended == "completed"
    aside = tmp_path / "a" / "unfinished" / "r1" / "manifest.json"
    assert json.loads(aside.read_text())["ended"] == left
    assert f"moved to {aside.parent}" in console.file.getvalue()


def test_another_definition_under_the_same_name_is_refused_with_the_keys(tmp_path):
    all_of([cell("a")], tmp_path)
    other = cell("a", rate="6/s", engine=f"{ENGINE},mode=static")
    with pytest.raises(UsageError) as refused:
        run_cells([other], tmp_path, repeats=1, console=quiet())
    lines = str(refused.value).splitlines()
    assert lines[0].startswith(f"{tmp_path / 'a'}: holds runs of a cell with another definition")
    assert lines[1:] == [
        "  scenario.arrivals.rate: '4/s' → '6/s'",
        "  engine: ['shape=8b', 'hardware=h200'] → ['shape=8b', 'hardware=h200', 'mode=static']",
    ]


def test_a_changed_target_file_is_another_definition(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("url: http://localhost:1\n")
    before = definition(cell("a", target=str(file)))
    file.write_text("url: http://localhost:2\n")
    (line,) = differing(definition(cell("a", target=str(file))), before)
    assert line.startswith("target_file_sha256: ")


def test_a_definition_holds_no_key():
    said = definition(cell("a", target="reference", engine="mode=chunked,api_key=hunter2"))
    assert "hunter2" not in json.dumps(said)


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "servers", "a b"])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be the name of a folder"):
        check_cells([cell(name)], tmp_path)


def test_two_cells_of_one_name_are_refused(tmp_path):
    with pytest.raises(UsageError, match="two cells have this name"):
        check_cells([cell("a"), cell("a", rate="6/s")], tmp_path)


def test_a_cell_that_cannot_be_measured_is_told_and_the_rest_go_on(tmp_path):
    cells = [cell("a", engine="mode=chunkd"), cell("b")]
    found = {f.cell.name: f for f in all_of(cells, tmp_path)}
    assert isinstance(found["a"], CellFailure)
    assert "did you mean 'chunked'" in found["a"].reason
    assert isinstance(found["b"], CellRun)


def test_the_warm_up_is_traffic_of_the_cell_that_does_not_count(tmp_path):
    (found,) = all_of([cell("a")], tmp_path, between=Between(warm_up_s=1.5))
    assert found.run.manifest.window.warmup_s == 1.5
    assert found.summary.counts["warmup"] > 0
    longer = replace(cell("b"), scenario=load_scenario("quickstart", ["phases.warmup=3s"]))
    (found,) = all_of([longer], tmp_path, between=Between(warm_up_s=1.5))
    assert found.run.manifest.window.warmup_s == 3.0


def test_who_leaves_early_goes_on_from_there(tmp_path):
    cells = [cell("a"), cell("b"), cell("c")]
    running = run_cells(cells, tmp_path, repeats=1, console=quiet())
    seen = [next(running).cell.name for _ in range(2)]
    running.close()
    again = all_of(cells, tmp_path)
    assert [f.cell.name for f in again if f.was_reused] == seen


def test_the_page_of_a_run_that_an_interrupt_left_without_is_made_when_it_goes_on(tmp_path):
    (first,) = all_of([cell("a")], tmp_path)
    for name in ("report.html", "summary.json"):
        (first.directory / name).unlink()
    (again,) = all_of([cell("a")], tmp_path)
    assert again.was_reused
    assert "a-r1" in (first.directory / "report.html").read_text()
    assert json.loads((first.directory / "summary.json").read_text())["verdict"]
