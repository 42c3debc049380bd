"""Pairs of runs whose servers are both up: one follows the other at once, and none is lost."""

import io
import json
import os
import signal
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import CellFailure, CellRun
from loadgen.workload.scenario import scenario_from_flags
from tests.e2e.lenient import LENIENT

pytestmark = pytest.mark.e2e


@pytest.fixture
def pair(tmp_path, page_cache):
    """The runs of a cell and of its control, `target` with other settings or one that fails."""

    def run(target, engine, control_engine=None, repeats=1, **options):
        scenario = scenario_from_flags(
            rate="10/s", input_len=40, output_len=4, duration="1s", overrides=LENIENT
        )
        plain = RunOptions(n_workers=1, engine=engine, cache_dir=page_cache)
        cell = Cell("cell", scenario, target, plain)
        other = RunOptions(n_workers=1, engine=control_engine or engine, cache_dir=page_cache)
        control = Cell("control", scenario, target, other, server="control", stays_up=True)
        return run_cells(
            [cell],
            tmp_path / "out",
            repeats=repeats,
            console=Console(file=io.StringIO()),
            controls={"cell": control},
            **options,
        )

    return run


def test_nothing_is_asked_of_either_server_between_the_runs_of_a_pair(pair):
    found = list(pair("reference", "device=toy,shape=nano", repeats=2))
    assert [f.cell.name for f in found] == ["control", "cell", "cell", "control"]
    for pair_of_runs in (found[:2], found[2:]):
        epochs_s = [one.run.manifest.epoch_s for one in pair_of_runs]
        for one, epoch_s in zip(pair_of_runs, epochs_s, strict=True):
            assert one.summary.counts["ok"] == one.summary.counts["due"] > 0
            events = pd.read_parquet(one.directory / "engine_events.parquet")
            asked = events[(events.kind == "arrival") & events.row.isna()]  # by the preflight
            assert bool(len(asked)) == (one.repeat == 1), "it stays up and was found fit"
            assert (epoch_s + asked.t_s < epochs_s[0]).all()
        last_s = epochs_s[0] + pair_of_runs[0].run.request_rows["done_s"].max()
        assert last_s < epochs_s[1] + pair_of_runs[1].run.request_rows["sent_s"].min()


def test_an_interrupt_between_the_runs_of_a_pair_leaves_the_first_with_its_page(pair, tmp_path):
    asked = []

    def gauge(cell):
        asked.append(cell.name)
        if asked == ["control", "control", "cell"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(pair("mock", "ttft=1ms", gauge=gauge))
    kept = tmp_path / "out" / "control" / "r1"
    assert json.loads((kept / "manifest.json").read_text())["ended"] == "completed"
    assert json.loads((kept / "summary.json").read_text())["counts"]["ok"] > 0
    assert "control-r1" in (kept / "report.html").read_text()
    assert not (tmp_path / "out" / "cell" / "r1").exists()


def test_a_run_is_measured_although_its_partner_is_unfit(pair):
    failed, measured = pair("mock", "ttft=1ms", "ttft=1ms,fail=500")
    assert isinstance(failed, CellFailure)
    assert failed.cell.name == "control"
    assert isinstance(measured, CellRun)
    assert measured.summary.counts["ok"] > 0


def test_a_server_that_ends_while_its_partner_is_measured_is_a_failure(pair):
    def gauge(cell):
        if cell.name == "control":
            kill_child("2ms")

    measured, failed = pair("mock", "ttft=2ms", "ttft=1ms", gauge=gauge)
    assert isinstance(measured, CellRun)
    assert isinstance(failed, CellFailure)
    assert failed.reason.startswith("the mock ended with code -9: ")


def kill_child(word):
    """SIGKILL to the child of ours with `word` in its command line, if there still is one."""
    ours = f"/proc/{os.getpid()}/task/{os.getpid()}/children"
    for pid in map(int, Path(ours).read_text().split()):
        if word in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
