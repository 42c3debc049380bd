"""The load process next to a worker: its files after the end of the worker."""

import io
import os

import numpy as np
import pytest

from loadgen.archive import store
from loadgen.drive.worker_messages import MessageReader, ReceivedParts, part_messages
from loadgen.records import CHUNKS, REQUESTS, Names
from loadgen.web.load_process import Outbox, remove_if_empty


def test_a_folder_with_rows_stays(tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "shard-0.npz").touch()
    remove_if_empty(tmp_path / "share")
    assert (tmp_path / "share" / "shard-0.npz").exists()


def test_a_folder_without_rows_is_removed(tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "log").write_text("a line\n")
    remove_if_empty(tmp_path / "share")
    assert not (tmp_path / "share").exists()


@pytest.mark.faults
def test_rows_that_a_full_disk_does_not_take_are_sent_with_the_others(tmp_path, capfd):
    rows, chunks = np.zeros(3, REQUESTS), np.zeros(0, CHUNKS)
    rows["request_id"] = [5, 6, 7]
    store.write_part(tmp_path / "shard-0-0000.npz", rows[:2], chunks, Names())
    (tmp_path / "shard-0.npz.partial").mkdir()
    reading, writing = os.pipe()
    out, messages, received = Outbox(writing, tmp_path), MessageReader(), ReceivedParts()
    for message in part_messages("shard-0.npz", store.part_bytes(rows[2:], chunks, Names())):
        out.write("part", **message)
    out.write("done", instrument={"shard": 0})
    *parts, done = messages.feed(os.read(reading, 1 << 16))
    for fd in (reading, writing):
        os.close(fd)
    for part in parts:
        received.add(part)
    assert done == {"kind": "done", "instrument": {"shard": 0}}
    (content,) = received.whole.values()
    sent, _, _ = store.part_of_file(io.BytesIO(content), "the message")
    assert sorted(sent["request_id"].tolist()) == [5, 6, 7]
    assert "its rows go to the master, and no copy stays" in capfd.readouterr().err
