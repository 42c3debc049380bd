"""The end of the pipe between the control process and its master, with a scripted worker."""

import contextlib
import socket
import threading

from loadgen.web.assignment import assignments
from loadgen.web.control_messages import Assign, Ping, Pong, ShareReady, Up, encode, read_down
from loadgen.web.relay_pipe import FromWorker, RelayPipe, ToWorker, Unpacker, pack
from loadgen.web.remote_fleet import RemoteFleet
from tests.web.test_assignment import job


def answer(end, sha256):
    """A worker that answers pings, accepts its share, and reports that it is ready."""
    unpacker = Unpacker(for_master=True)
    while data := end.recv(1 << 20):
        for message in unpacker.feed(data):
            if not isinstance(message, ToWorker):
                continue
            said = read_down(message.data)
            if isinstance(said, Ping):
                answered: Up = Pong(said.run, said.sent_ns, said.sent_ns)
            elif isinstance(said, Assign):
                answered = ShareReady(said.run, said.shard, sha256, "host", "1")
            else:
                continue
            with contextlib.suppress(BrokenPipeError):  # the test closes the line when it likes
                end.sendall(pack(FromWorker(message.worker, encode(answered))))


def test_a_line_that_is_closed_ends_the_run_at_once(tmp_path):
    """No worker can come back over it: missing rows are lost, without a wait."""
    ours, theirs = socket.socketpair()
    asked, ticks = job(), []
    (given,) = assignments(asked, 1)
    worker = threading.Thread(target=answer, args=(theirs, given.sha256))
    worker.start()
    with ours, theirs:
        with RemoteFleet(RelayPipe(ours), ["w"], 10.0, "continue", tmp_path) as fleet:
            fleet.hand_over(asked)
            outcome = fleet.run(
                on_beat=lambda shard, beat: None,
                on_start=lambda epoch_ns: theirs.shutdown(socket.SHUT_RDWR),
                on_idle=lambda: ticks.append(1),
                on_death=lambda shard, reason: None,
            )
        worker.join(60)  # it reads `theirs` until then
        assert not worker.is_alive()
    assert outcome.dead == {0: "its worker is silent"}
    assert len(ticks) < 20
