"""Lines between a load-generating process and its parent: whole and in order, or refused."""

import fcntl
import itertools
import json
import os
import signal
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.worker_messages import (
    BadMessage,
    CommandWriter,
    Lines,
    MessageReader,
    MessageWriter,
    ReceivedParts,
    part_messages,
)
from tests.waits import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pipes and /proc of Linux")
WRITER = """
from loadgen.drive.worker_messages import MessageWriter

MessageWriter(1).write("done", instrument="x" * 1_000_000)
"""


def is_full(pipe):
    n_unread = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]
    return n_unread == fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def state(pid):
    """The letter of proc(5)."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.faults
def test_a_line_is_whole_though_its_writer_was_stopped_at_a_full_pipe():
    command = [sys.executable, "-P", "-c", WRITER]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        wait_until(lambda: is_full(process.stdout), 30, "the pipe is not full")
        wait_until(lambda: state(process.pid) == "S", 10, "it does not wait for the pipe")
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(process.pid) == "T", 10, "it was not stopped")
        process.send_signal(signal.SIGCONT)  # the write returns what it had written so far
        assert process.stdout is not None
        line = process.stdout.read()
    assert process.returncode == 0
    assert line.endswith(b"\n")
    assert json.loads(line) == {"kind": "done", "instrument": "x" * 1_000_000}


def test_beats_do_not_wait_for_a_parent_that_does_not_read():
    reading, writing = os.pipe()
    writer = MessageWriter(writing)
    for number in range(100):
        writer.write("beat", number=number, ended="x" * 4000)  # 400 kB; a pipe holds 64
    reader, numbers = MessageReader(), list[int]()
    while len(numbers) < 100:
        numbers += [message["number"] for message in reader.feed(os.read(reading, 1 << 20))]
        writer.write("beat", number=100, ended="")
    os.close(reading)
    writer.write("done", instrument={})  # nobody reads it: no error
    os.close(writing)
    assert numbers[:100] == list(range(100))


@given(st.lists(st.integers(0, 400), max_size=8))
def test_messages_are_the_same_wherever_their_bytes_are_cut(cuts):
    lines = b'{"kind": "ready", "opened": 3}\n{"kind": "beat", "now_s": 1.5}\n{"kind": "done"}\n'
    places = [0, *sorted(cuts), len(lines)]
    reader = MessageReader()
    pieces = [lines[start:stop] for start, stop in itertools.pairwise(places)]
    assert [message for piece in pieces for message in reader.feed(piece)] == [
        {"kind": "ready", "opened": 3},
        {"kind": "beat", "now_s": 1.5},
        {"kind": "done"},
    ]


@pytest.mark.parametrize(
    "line",
    [b'{"kind": "beat", "n": {"kind": "beat"}', b"loading a plug-in", b"[1]", b"{}", b"\xff"],
)
def test_a_line_that_is_no_message_is_refused_with_its_beginning(line):
    reader = MessageReader()
    with pytest.raises(BadMessage) as bad:
        reader.feed(b'{"kind": "ready"}\n' + line + b"\n")
    assert str(bad.value).startswith(
        "unreadable message: " + ascii(line[:9].decode("latin-1"))[:-1]
    )


def test_commands_wait_for_a_frozen_process_and_arrive_whole():
    reading, writing = os.pipe()
    commands, lines = CommandWriter(writing), Lines()
    for number in range(30_000):
        commands.write("STOP", f"{number:f}", "the run\nwas stopped")
    received = list[bytes]()
    while len(received) < 30_000:
        received += lines.split(os.read(reading, 777))
        commands.flush()
    assert received[0] == b"STOP 0.000000 the run was stopped"  # a line break would be a command
    assert received[-1] == b"STOP 29999.000000 the run was stopped"
    os.close(reading)
    commands.write("STOP")  # nobody reads it: no error
    os.close(writing)


@pytest.mark.parametrize("size", [0, 1, 49_152, 200_000])
def test_rows_arrive_as_they_were_sent(size):
    content = np.random.default_rng(size).bytes(size)
    received = ReceivedParts()
    for fields in part_messages("shard-0.npz", content or b"x"):
        received.add(json.loads(json.dumps(fields)))
    assert received.whole == {"shard-0.npz": content or b"x"}


def test_rows_that_are_cut_are_none():
    received = ReceivedParts()
    first, *_ = part_messages("shard-0.npz", bytes(100_000))
    received.add(first)
    assert not received.whole
    with pytest.raises(BadMessage, match="unreadable rows"):
        received.add({"kind": "part", "name": "shard-0.npz", "data": "?", "is_last": True})
