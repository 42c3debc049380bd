import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from loadgen.archive import checksums, store
from loadgen.errors import RunInvalid, UsageError
from loadgen.manifest.self_report import ClientReport
from loadgen.records import (
    CHUNKS,
    EDGES,
    FIRST_PIECE,
    PIECES,
    SCHEDULE,
    SERVER,
    FinishReason,
    Names,
    Run,
    Status,
    empty_requests,
)
from tests.runs import MANIFEST, SHARD, write_to


def schedule_of(n):
    schedule = np.zeros(n, SCHEDULE)
    schedule["request_id"] = np.arange(n)
    schedule["scheduled_s"] = np.arange(n) * 0.25
    schedule["prompt_seed"] = 2**63 + np.arange(n, dtype=np.uint64)
    schedule["priority"] = -3
    return schedule


def part_of(schedule, rows, error="", remote="10.0.0.1:80"):
    part = empty_requests(schedule[rows])
    part["status"] = Status.http_error if error else Status.ok
    part["error_id"] = 1 if error else 0
    part["remote_id"] = 1
    part["sent_s"] = part["request_id"] + 0.125
    chunks = np.zeros(len(rows), CHUNKS)
    chunks["request_id"] = schedule["request_id"][rows]
    chunks["received_s"] = 1.5
    return part, chunks, Names(errors=("", error) if error else ("",), remotes=("", remote))


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_merging_restores_every_row_whichever_shard_had_it(owner):
    schedule = schedule_of(len(owner))
    parts = [
        part_of(schedule, [i for i, o in enumerate(owner) if o == shard], error=f"e{shard}")
        for shard in range(3)
    ]
    requests, chunks, names = store.merge_parts(schedule, parts)
    assert requests["request_id"].tolist() == list(range(len(owner)))
    assert [names.errors[i] for i in requests["error_id"]] == [f"e{o}" for o in owner]
    assert requests["sent_s"].tolist() == [i + 0.125 for i in range(len(owner))]
    assert chunks["request_id"].tolist() == list(range(len(owner)))


def test_the_parts_of_a_shard_are_joined_and_those_of_others_left(tmp_path):
    schedule = schedule_of(6)
    for name, own in (("2", [5]), ("2-0000", [0, 3]), ("2-0001", [1]), ("21-0000", [2, 4])):
        part = part_of(schedule, own, error=f"e{name}")
        store.write_part(tmp_path / f"shard-{name}.npz", *part)
    store.join_parts(tmp_path / "shard-2.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-2.npz", "shard-21-0000.npz"]
    rows, chunks, names = store.read_part(tmp_path / "shard-2.npz")
    texts = {
        int(row): names.errors[k]
        for row, k in zip(rows["request_id"], rows["error_id"], strict=True)
    }
    assert texts == {0: "e2-0000", 1: "e2-0001", 3: "e2-0000", 5: "e2"}
    assert chunks["request_id"].tolist() == [0, 1, 3, 5]


def test_the_names_of_many_parts_cannot_outgrow_their_column():
    schedule = schedule_of(70)
    parts = [part_of(schedule, [k], error=f"e{k}") for k in range(70)]
    crowded = [
        (
            rows,
            chunks,
            replace(names, errors=(*names.errors, *map(str, range(1000 * k, 1000 * k + 999)))),
        )
        for k, (rows, chunks, names) in enumerate(parts)
    ]
    rows, _, names = store.merge_parts(schedule, crowded)
    assert names.errors[rows["error_id"][0]] == "e0"
    assert len(names.errors) < 1010
    assert "different texts" in names.errors[rows["error_id"][69]]


def test_rows_of_a_dead_shard_are_lost_and_say_why():
    schedule = schedule_of(4)
    requests, _, names = store.merge_parts(schedule, [part_of(schedule, [0, 2])])
    assert requests["status"].tolist() == [Status.ok, Status.lost, Status.ok, Status.lost]
    assert "died" in names.errors[requests["error_id"][1]]


@pytest.mark.parametrize("rows", [[[0, 1], [1]], [[0], [7]]])
def test_a_row_recorded_twice_or_never_scheduled_is_refused(rows):
    all_rows = schedule_of(8)
    with pytest.raises(RunInvalid, match="twice or uninvited"):
        store.merge_parts(all_rows[:4], [part_of(all_rows, r) for r in rows])


@pytest.fixture
def recorded(tmp_path):
    schedule = schedule_of(3)
    requests, chunks, names = store.merge_parts(
        schedule, [part_of(schedule, [0, 1, 2], "HTTP 500")]
    )
    requests["finish_reason"][1] = FinishReason.length
    edges = np.array([(2, 0, 0.0), (2, 1, 1.5)], EDGES)
    names = replace(names, series=("running", 'wait_s{reason="kv"}'))
    server = np.array([(-0.04, 0, 3.0), (-0.04, 1, 0.5), (1.0, 0, 4.0)], SERVER)
    run = Run(MANIFEST, schedule, requests, chunks, edges, names, ClientReport((SHARD,)), server)
    run.request_rows["chunks"] = 1
    return write_to(tmp_path, run, {"ttft_s": np.array([0.1, 0.2, np.nan])}), tmp_path


def test_a_run_reads_back_as_it_was_written(recorded):
    run, directory = recorded
    again = store.read_run(directory)
    for name in ("schedule_rows", "request_rows", "chunk_rows", "edge_rows", "server_rows"):
        assert getattr(again, name).tobytes() == getattr(run, name).tobytes(), name
    assert again.manifest == run.manifest
    assert again.instrument == run.instrument
    assert again.names == run.names


def test_the_servers_metrics_read_well_in_a_notebook(recorded):
    server = store.read_run(recorded[1]).server
    assert server.columns.tolist() == ["t_s", "value", "series"]
    assert server[server.series == "running"].value.tolist() == [3.0, 4.0]
    assert pd.read_parquet(recorded[1] / "server.parquet").series.tolist()[1] == (
        'wait_s{reason="kv"}'
    )


def test_the_file_reads_well_in_a_notebook(recorded):
    frame = pd.read_parquet(recorded[1] / "requests.parquet")
    assert frame.status.tolist() == ["http_error"] * 3
    assert frame.error.tolist() == ["HTTP 500"] * 3
    assert frame.remote_address.tolist() == ["10.0.0.1:80"] * 3
    assert frame.ttft_s.tolist()[:2] == [0.1, 0.2]


def test_a_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        store.read_run(tmp_path)


@pytest.mark.faults
def test_an_unfinished_run_is_told_from_a_damaged_one(recorded):
    directory = recorded[1]
    (directory / "chunks.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(RunInvalid, match=r"chunks\.parquet: damaged"):
        store.read_run(directory)
    (directory / "chunks.parquet").unlink()
    with pytest.raises(RunInvalid, match=r"chunks\.parquet: is missing"):
        store.read_run(directory)
    store.write_schedule(directory, recorded[0])
    with pytest.raises(UsageError, match="never finished"):
        store.read_run(directory)


def test_a_newer_schema_names_the_version_that_wrote_it(recorded):
    directory = recorded[1]
    manifest = json.loads((directory / "manifest.json").read_text())
    content = {**manifest, "schema": 9, "slobench": "7.0"}
    (directory / "manifest.json").write_text(json.dumps(content))
    (directory / checksums.NAME).unlink()
    with pytest.raises(RunInvalid, match=r"written by slobench 7\.0"):
        store.read_run(directory)


def test_a_part_survives_its_file(tmp_path):
    schedule = schedule_of(5)
    requests, chunks, names = part_of(schedule, [1, 3], "broken pipe")
    store.write_part(tmp_path / "part.npz", requests, chunks, names)
    again = store.read_part(tmp_path / "part.npz")
    assert again[0].tobytes() == requests.tobytes()
    assert again[1].tobytes() == chunks.tobytes()
    assert again[2] == names


def test_the_pieces_of_prompts_are_stored_in_a_file_that_can_be_mapped(recorded):
    run, directory = recorded
    assert not (directory / "pieces.npy").exists()
    pieces = np.array([(0, 512), (FIRST_PIECE, 64)], PIECES)
    folder = directory / "pieces"
    write_to(folder, replace(run, piece_rows=pieces), {})
    assert store.read_run(folder).piece_rows.tobytes() == pieces.tobytes()
    mapped = np.load(folder / "pieces.npy", mmap_mode="r")
    assert mapped.tolist() == [(0, 512), (FIRST_PIECE, 64)]
    pieces["tokens"][1] = 65
    np.save(folder / "pieces.npy", pieces)
    with pytest.raises(RunInvalid, match="pieces"):
        store.read_run(folder)
    checksums.cover(folder, folder / "pieces.npy")
    with pytest.raises(RunInvalid, match="schedule_sha256"):
        store.read_run(folder)


def test_edges_of_older_runs_have_no_delay(recorded):
    run, directory = recorded
    links = np.array([(2, 0, 0.0), (2, 1, 0.0)], EDGES)
    write_to(directory / "older", replace(run, edge_rows=links), {})
    path = directory / "older" / "edges.parquet"
    parquet.write_table(parquet.read_table(path).drop_columns(["delay_s"]), path)
    checksums.cover(directory / "older", path)
    assert store.read_run(directory / "older").edge_rows.tolist() == [(2, 0, 0.0), (2, 1, 0.0)]


def test_requests_recorded_before_hidden_tokens_were_counted_have_none(recorded):
    run, directory = recorded
    path = directory / "requests.parquet"
    later = ["hidden_tokens", "unknown_events", "retry_after_s"]
    parquet.write_table(parquet.read_table(path).drop_columns(later), path)
    checksums.cover(directory, path)
    rows = store.read_run(directory).request_rows
    assert not rows["hidden_tokens"].any()
    assert not rows["unknown_events"].any()
    assert np.isnan(rows["retry_after_s"]).all()
    assert rows["status"].tolist() == run.request_rows["status"].tolist()
