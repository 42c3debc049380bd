"""The step and event logs as files."""

from __future__ import annotations

import json

import pyarrow.parquet as pq

from reference_engine.state.steps import StepLog
from reference_engine.step_log.step_files import EPOCH_KEY, EVENTS, STEPS, StepFiles
from tests.reference_engine.engine_kit import request, rig


def logged(directory, level="sizes"):
    files = StepFiles(directory, epoch_ns=123)
    log = StepLog(level, on_step=files.on_step, on_event=files.on_event)
    return files, rig(log=log, token_budget=16)


def test_every_step_and_event_is_a_row(tmp_path):
    files, engine = logged(tmp_path / "logs", "full")
    engine.admit(request("a", [1] * 20, 3, tenant="blue"), request("b", [2] * 5, 2))
    engine.drain()
    files.close()
    steps = pq.read_table(tmp_path / "logs" / STEPS)
    assert steps.schema.metadata[EPOCH_KEY.encode()] == b"123"
    rows = steps.to_pylist()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert len(rows) == engine.state.counters.steps
    assert sum(row["n_prefill_tokens"] for row in rows) == 25
    assert rows[0]["items"] == [{"request_id": "a", "tokens": 16}]
    assert rows[0]["causes"] == [{"reason": "no_token_budget", "requests": 1}]
    assert {row["policy"] for row in rows} == {"chunked"}
    events = pq.read_table(tmp_path / "logs" / EVENTS).to_pylist()
    assert [(e["kind"], e["request_id"]) for e in events if e["kind"] == "arrival"] == [
        ("arrival", "a"),
        ("arrival", "b"),
    ]
    assert {e["request_id"] for e in events if e["kind"] == "finish"} == {"a", "b"}
    assert events[0]["tenant"] == "blue"
    assert json.loads(events[0]["detail"])["n_prompt"] == 20


def test_an_engine_that_did_nothing_leaves_readable_files(tmp_path):
    files, _ = logged(tmp_path)
    files.close()
    assert [pq.read_table(tmp_path / name).num_rows for name in (STEPS, EVENTS)] == [0, 0]


def test_a_long_run_is_written_in_pieces_and_seen_when_it_is_complete(tmp_path):
    files, engine = logged(tmp_path)
    engine.admit(request("a", [1], 1000))
    engine.drain()
    for record in list(engine.state.log.steps) * 5:
        files.on_step(record)
    assert not (tmp_path / STEPS).exists()
    files.close()
    found = pq.ParquetFile(tmp_path / STEPS)
    assert found.metadata.num_rows == 6000
    assert found.metadata.num_row_groups == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [EVENTS, STEPS]


def test_a_disk_that_fails_does_not_stop_the_engine(tmp_path, caplog):
    (tmp_path / STEPS).mkdir()
    files, engine = logged(tmp_path)
    engine.admit(request("a", [1], 4))
    engine.drain()
    files.close()
    assert "is incomplete: writing it failed" in caplog.text
