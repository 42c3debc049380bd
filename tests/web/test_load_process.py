"""The load process next to a worker: its files after the end of the worker."""

import os

import pytest

from loadgen.web.load_process import remove_if_orphaned


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "shard").mkdir()
    (tmp_path / "shard" / "log").write_text("said\n")
    return tmp_path / "shard"


@pytest.fixture
def pipe():
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    yield ours, theirs
    os.close(ours)


@pytest.mark.parametrize("said", [b"", b"STOP 0.0 the end\n"])
def test_rows_that_a_worker_may_still_read_stay(folder, pipe, said):
    ours, theirs = pipe
    os.write(theirs, said)
    remove_if_orphaned(ours, folder)
    assert (folder / "log").read_text() == "said\n"
    os.close(theirs)


@pytest.mark.parametrize("said", [b"", b"STOP 0.0 the end\n"])
def test_nothing_stays_where_the_worker_is_gone(folder, pipe, said):
    ours, theirs = pipe
    os.write(theirs, said)
    os.close(theirs)
    remove_if_orphaned(ours, folder)
    assert not folder.exists()
