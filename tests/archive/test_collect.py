"""Rows that workers kept, added to a run whose master ended before it had them."""

import shutil

import pytest

from loadgen.archive import store
from loadgen.archive.collect import KeptShare, collect, kept_shares
from loadgen.errors import UsageError
from loadgen.records import Status
from tests.runs import measured_run, with_manifest, write_to

N = 60


@pytest.fixture
def run(tmp_path):
    """A run of two workers that ended with the rows of the first alone."""
    whole = with_manifest(measured_run(n_requests=N), run="evening", ended="running")
    whole = write_to(tmp_path / "run", whole)
    for name in ("requests.parquet", "chunks.parquet"):
        (tmp_path / "run" / name).unlink()
    store.write_schedule(tmp_path / "run", whole)
    (tmp_path / "run" / "parts").mkdir()
    store.write_part(tmp_path / "run" / "parts" / "shard-0.npz", *part(whole, 0))
    return whole


def part(run, shard):
    mine = run.request_rows["request_id"] % 2 == shard
    chunks = run.chunk_rows[run.chunk_rows["request_id"] % 2 == shard]
    return run.request_rows[mine], chunks, run.names


def keep(run, place, shard, name="evening"):
    folder = place / f"{name}-{shard}"
    folder.mkdir(parents=True)
    share = KeptShare(folder, name, shard)
    share.note()
    store.write_part(share.part, *part(run, shard))
    return share


def test_kept_rows_are_added_and_removed_at_the_worker(run, tmp_path):
    share = keep(run, tmp_path / "kept", 1)
    assert collect(tmp_path / "run", [tmp_path / "kept"]) == [share]
    found = store.read_run(tmp_path / "run")
    assert found.request_rows["status"].tolist() == run.request_rows["status"].tolist()
    assert len(found.chunk_rows) == len(run.chunk_rows)
    assert found.manifest.ended == "stopped"
    assert not share.folder.exists()
    with pytest.raises(UsageError, match="no worker keeps rows of run evening"):
        collect(tmp_path / "run", [tmp_path / "kept"])


def test_two_copies_of_a_share_are_added_once(run, tmp_path):
    """As when a folder was copied here and stays at the worker, too."""
    share = keep(run, tmp_path / "kept", 1)
    shutil.copytree(tmp_path / "kept", tmp_path / "copied")
    added = collect(tmp_path / "run", [tmp_path / "copied", tmp_path / "kept"])
    assert len(added) == 1
    found = store.read_run(tmp_path / "run")
    assert len(found.request_rows) == N
    assert len(found.chunk_rows) == len(run.chunk_rows)
    assert not share.folder.exists()


def test_rows_that_the_master_has_are_not_added_again(run, tmp_path):
    """The master's confirmation was lost."""
    keep(run, tmp_path / "kept", 0)
    assert collect(tmp_path / "run", [tmp_path / "kept"]) == []
    found = store.read_run(tmp_path / "run")
    is_lost = found.request_rows["status"] == Status.lost
    assert is_lost.tolist() == [number % 2 == 1 for number in range(N)]
    assert len(found.chunk_rows) == len(part(run, 0)[1])


def test_a_report_with_lost_rows_is_completed(run, tmp_path):
    """The master had written its tables before the second worker came back."""
    keep(run, tmp_path / "kept", 0)
    collect(tmp_path / "run", [tmp_path / "kept"])
    keep(run, tmp_path / "kept", 1)
    keep(run, tmp_path / "kept", 1, name="another")
    assert [share.shard for share in collect(tmp_path / "run", [tmp_path / "kept"])] == [1]
    found = store.read_run(tmp_path / "run")
    assert found.request_rows["status"].tolist() == run.request_rows["status"].tolist()
    assert len(found.chunk_rows) == len(run.chunk_rows)
    assert [share.run for share in kept_shares([tmp_path / "kept"])] == ["another"]
