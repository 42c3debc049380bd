"""Cells on real servers: kept up between neighbours, settled, and their logs shared out."""

import io
import itertools
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import CellRun
from loadgen.workload.scenario import scenario_from_flags
from tests.e2e.lenient import LENIENT

pytestmark = pytest.mark.e2e
CACHE: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def _cache(page_cache):
    CACHE["dir"] = page_cache


def cell(name, target, rate="8/s", engine="", settings=(), **overrides):
    scenario = scenario_from_flags(
        rate=rate, input_len=40, output_len=4, duration="1s", overrides=LENIENT | overrides
    )
    options = RunOptions(
        n_workers=1, engine=engine, target_settings=settings, cache_dir=CACHE["dir"]
    )
    return Cell(name, scenario, target, options, {})


def measured(cells, directory, repeats=1, **options):
    """What was told, and the runs that came of it."""
    told = io.StringIO()
    console = Console(file=told, width=200)
    found = list(run_cells(cells, directory, repeats=repeats, console=console, **options))
    return told.getvalue(), [f for f in found if isinstance(f, CellRun)]


def test_neighbours_share_an_engine_that_forgets_in_between(tmp_path):
    toy = "device=toy,shape=nano"
    shared = {"prompts.salt": "none"}
    cells = [
        cell("slow", "reference", engine=toy, **shared),
        cell("fast", "reference", "20/s", toy, **shared),
        cell("other", "reference", engine=f"{toy},mode=static", **shared),
    ]
    ticks = itertools.count(1.0)
    gauge = {"gauge": lambda cell: None if cell.name == "other" else next(ticks)}
    said, found = measured(cells, tmp_path, repeats=2, **gauge)
    assert len(found) == 6
    asked = [f.paces for f in found if f.cell.name != "other"]
    assert asked == [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0), (7.0, 8.0)]
    again = measured(cells, tmp_path, repeats=2, **gauge)[1]
    assert [f.paces for f in again] == [f.paces for f in found]
    assert next(ticks) == 9.0, "what is there already was not asked again"
    assert all(f.summary.counts["ok"] == f.summary.counts["due"] > 0 for f in found)
    urls = [f.run.manifest.target.url for f in found]
    assert len(set(urls)) == 3  # one server is kept over the turning point of the two rounds
    assert said.count("cache_reset    POST /reset_prefix_cache") == 3
    assert said.count("drained        nothing in flight") == 3
    # The repeats of a cell have other seeds, but both cells of one scenario send the same prompts.
    assert all((f.run.request_rows["cached_tokens"] == 0).all() for f in found)
    for f in found:
        events = pd.read_parquet(f.directory / "engine_events.parquet")
        arrivals = events[events.kind == "arrival"].dropna(subset="row").sort_values("row")
        rows = f.run.request_rows
        assert list(arrivals.row) == list(rows["request_id"])
        assert (arrivals.t_s.to_numpy() >= rows["sent_s"]).all()
        assert (arrivals.t_s.to_numpy() <= rows["first_token_s"]).all()


def test_a_launch_command_is_varied_and_a_server_that_does_not_start_is_told(tmp_path):
    file = tmp_path / "target.yaml"
    file.write_text(
        "launch: {preset: reference, args: --set device=toy --shape nano}\nlabels: {gpus: 2}\n"
    )
    cells = [
        cell("static", str(file), settings=["launch.args=--set device=toy --mode static"]),
        cell("broken", str(file), settings=["launch.args=--mode chunkd"]),
        cell("same", str(file)),
    ]
    said, found = measured(cells, tmp_path)
    assert "broken, repeat 1 failed: the launched server ended with code 2" in said
    assert "did you mean 'chunked'" in said
    by_name = {f.cell.name: f for f in found}
    assert set(by_name) == {"static", "same"}
    launch = by_name["static"].run.manifest.target.launch
    assert launch["command"].endswith("--set device=toy --mode static")
    assert by_name["same"].run.manifest.target.labels.gpus == 2
    assert all(f.summary.counts["ok"] == f.summary.counts["due"] > 0 for f in found)
