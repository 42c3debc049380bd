"""Child servers: waited for, reported in a line if they end early, and ended with their parent."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from loadgen.errors import MissingDependency, TargetError, UsageError
from targets.child import child_server, log_tail
from tests.targets.processes import is_running
from tests.waits import wait_until


def install(tmp_path, monkeypatch, code):
    """A module that the child can run, found through PYTHONPATH."""
    (tmp_path / "served_by_test.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "served_by_test"


READY = """
    import os, sys, time
    print("warming up")
    print("READY http://127.0.0.1:1")
    print("x" * 200_000)
    sys.stderr.write("a warning\\n")
    print("arguments", *sys.argv[1:])
    sys.stdout.flush()
    {then}
"""


def test_a_child_runs_for_the_length_of_the_block(tmp_path, monkeypatch, capfd):
    module = install(tmp_path, monkeypatch, READY.format(then="time.sleep(60)"))
    with child_server("thing", module, ["--a", "b"], log_dir=tmp_path / "logs") as child:
        assert child.url == "http://127.0.0.1:1"
        assert child.log == tmp_path / "logs" / "thing.log"
        assert is_running(child.pid)
        line = f"arguments --a b --parent-pid {os.getpid()}"
        assert wait_until(lambda: line in child.log.read_text(), 10, "no arguments in the log")
    assert child.exit_code == -signal.SIGTERM
    assert not Path(f"/proc/{child.pid}").exists()
    assert {"warming up", "a warning"} <= set(child.log.read_text().splitlines())
    assert capfd.readouterr() == ("", "")


def test_a_child_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    then = "import signal; signal.signal(15, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    module = install(tmp_path, monkeypatch, READY.format(then=then))
    with child_server("thing", module, [], log_dir=tmp_path, grace_s=0.1) as child:
        assert wait_until(lambda: "deaf" in child.log.read_text(), 10, "no line in the log")
    assert child.exit_code == -signal.SIGKILL


def test_processes_that_a_child_started_end_with_it(tmp_path, monkeypatch):
    then = (
        "import subprocess; print('inner', subprocess.Popen(['sleep', '60']).pid); time.sleep(60)"
    )
    module = install(tmp_path, monkeypatch, READY.format(then=then))
    with child_server("thing", module, [], log_dir=tmp_path) as child:
        assert wait_until(lambda: "inner " in child.log.read_text(), 10, "no process id in the log")
        inner = int(child.log.read_text().rsplit("inner ", 1)[1].split()[0])
        assert is_running(inner)
    assert wait_until(lambda: not is_running(inner), 10, "the inner process did not end")


def test_an_error_in_the_block_still_reaps_the_child(tmp_path, monkeypatch):
    module = install(tmp_path, monkeypatch, READY.format(then="time.sleep(60)"))
    with (
        pytest.raises(KeyboardInterrupt),
        child_server("thing", module, [], log_dir=tmp_path) as child,
    ):
        raise KeyboardInterrupt
    assert child.exit_code == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (
            "import sys; sys.exit('error: no mode x; did you mean y?')",
            TargetError,
            "thing ended with code 1 before it was ready: no mode x; did you mean y? (log: ",
        ),
        (
            "import sys; sys.stderr.write('port 80 is taken\\n\\n'); sys.exit(2)",
            UsageError,
            "thing: port 80 is taken",
        ),
        (
            "import sys; sys.stderr.write('needs torch: pip install slobench[engine]\\n')\n"
            "sys.exit(2)",
            MissingDependency,
            "thing: needs torch: pip install slobench[engine]",
        ),
        (
            "import sys; sys.stderr.write('cannot load\\n'); sys.exit(3)",
            TargetError,
            "thing ended with code 3 before it was ready: cannot load (log: ",
        ),
        ("", TargetError, "thing ended with code 0 before it was ready: it wrote nothing"),
        (
            "import os; os.kill(os.getpid(), 9)",
            TargetError,
            "thing was killed by SIGKILL before it was ready: it wrote nothing",
        ),
        ("raise KeyError('x')", TargetError, "before it was ready: KeyError: 'x' (log: "),
    ],
)
def test_an_early_end_is_reported_with_the_childs_last_line(
    tmp_path, monkeypatch, code, kind, message
):
    module = install(tmp_path, monkeypatch, code)
    with (
        pytest.raises(kind) as caught,
        child_server("thing", module, [], log_dir=tmp_path / "logs"),
    ):
        pytest.fail("a dead child was called ready")
    assert type(caught.value) is kind
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_child_that_never_gets_ready_is_stopped_at_the_deadline(tmp_path, monkeypatch):
    module = install(
        tmp_path, monkeypatch, "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    )
    with (
        pytest.raises(TargetError, match=r"was not ready after 0\.4 s and was stopped"),
        child_server("thing", module, [], log_dir=tmp_path, ready_timeout_s=0.4, grace_s=1.0),
    ):
        pytest.fail("a silent child was called ready")
    pids = (tmp_path / "thing.log").read_text().split()
    assert not [pid for pid in pids if is_running(int(pid))]


PARENT = """
import sys, time
from pathlib import Path
from targets.embed import mock
with mock({}, Path(sys.argv[1])) as served:
    print(served.child.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_ends_when_its_parent_is_killed_outright(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    assert wait_until(lambda: not is_running(pid), 10, "the child did not end")


def test_lines_of_a_terminal_that_end_in_a_carriage_return_are_kept(tmp_path):
    """`docker run -t` writes CRLF; a progress bar overwrites its line after a CR."""
    log = tmp_path / "server.log"
    log.write_bytes(b"loading\r\n10 %\r90 %\r\n\r\nCUDA error\r\n")
    assert log_tail(log) == ["loading", "90 %", "CUDA error"]
