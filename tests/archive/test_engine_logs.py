"""The engine's logs, moved into a run."""

from __future__ import annotations

import uuid

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from loadgen.archive.engine_logs import ServedRun, adopt_engine_logs


def leave(directory, name, columns):
    (directory / "logs").mkdir(exist_ok=True, parents=True)
    table = pa.table(columns).replace_schema_metadata({"epoch_monotonic_ns": "7500000000"})
    parquet.write_table(table, directory / "logs" / name)


def test_times_count_from_the_run_and_events_name_their_row(tmp_path):
    directory = tmp_path / "a.b-1"
    leave(directory, "engine_steps.parquet", {"step": [0, 1], "t_s": [0.5, 3.0]})
    own = uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, "a.b-1"), "3")
    other = uuid.uuid5(uuid.uuid5(uuid.NAMESPACE_URL, "a.b-2"), "3")
    ids = [str(own), str(other), f"{own}#9", "preflight", ""]
    leave(directory, "engine_events.parquet", {"t_s": np.arange(5.0), "request_id": ids})
    served = ServedRun(directory, "a.b-1", epoch_s=10.0, n_requests=18)
    adopt_engine_logs(directory / "logs", [served])
    steps = parquet.read_table(directory / "engine_steps.parquet")
    assert steps.to_pydict() == {"step": [0, 1], "t_s": [-2.0, 0.5]}
    events = parquet.read_table(directory / "engine_events.parquet").to_pydict()
    assert events["t_s"] == pytest.approx(np.arange(5.0) - 2.5)
    assert events["row"] == [3, None, None, None, None]
    assert list((directory / "logs").iterdir()) == []


def test_a_run_without_an_engine_of_ours_gets_no_logs(tmp_path):
    adopt_engine_logs(tmp_path, [ServedRun(tmp_path, "a", 0.0, 0)])
    assert list(tmp_path.iterdir()) == []


def test_each_of_several_runs_gets_its_part(tmp_path):
    for name in ("r1", "r2"):
        (tmp_path / name).mkdir()
    leave(tmp_path, "engine_steps.parquet", {"step": [0, 1, 2, 3], "t_s": [0.5, 1.5, 3.5, 4.5]})
    # The engine's clock begins at 7.5: its steps were at 8, 9, 11 and 12.
    runs = [
        ServedRun(tmp_path / "r1", "r1", epoch_s=8.5, n_requests=1, begin_s=7.9, end_s=9.5),
        ServedRun(tmp_path / "r2", "r2", epoch_s=10.0, n_requests=1, begin_s=9.9, end_s=11.5),
    ]
    adopt_engine_logs(tmp_path / "logs", runs)
    found = [parquet.read_table(run.directory / "engine_steps.parquet") for run in runs]
    assert found[0].to_pydict() == {"step": [0, 1], "t_s": [-0.5, 0.5]}
    assert found[1].to_pydict() == {"step": [2], "t_s": [1.0]}


@pytest.mark.faults
def test_the_half_written_logs_of_a_killed_engine_are_removed(tmp_path):
    for name in ("engine_steps.partial", "engine_events.partial"):
        (tmp_path / name).write_bytes(b"PAR1")
    (tmp_path / "server.log").touch()
    adopt_engine_logs(tmp_path, [ServedRun(tmp_path, "a", 0.0, 0)])
    assert [path.name for path in tmp_path.iterdir()] == ["server.log"]
