"""A directory is written by a single process at a time; the refusal names the holder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.archive.directory import reserved, run_directory
from loadgen.archive.directory_lock import NAME, held, is_empty
from loadgen.errors import UsageError
from loadgen.studies.nightly.baseline import Baseline
from tests.waits import wait_until

HOLDER = """
import sys
from pathlib import Path
from loadgen.archive.directory_lock import held
with held(Path(sys.argv[1]), "x", "the test"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of `tmp_path / "a"`."""
    (tmp_path / "a").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_is_gone_at_the_end_and_its_file_too(tmp_path):
    for _ in range(2):
        with held(tmp_path, "--out a", "one"):
            assert list(tmp_path.iterdir()) == [tmp_path / NAME]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_a_directory_in_use_is_refused_with_the_holder_and_its_pid(holder, tmp_path):
    words = rf"--out a: in use by the test, pid {holder.pid} on "
    with pytest.raises(UsageError, match=words), held(tmp_path / "a", "--out a", "another"):
        pass
    (tmp_path / "a" / "manifest.json").write_text("{}")
    for force in (False, True):
        with (
            pytest.raises(UsageError, match=f"in use by the test, pid {holder.pid}"),
            run_directory("x", tmp_path / "a", force),
        ):
            pass
    assert (tmp_path / "a" / "manifest.json").exists()


@pytest.mark.faults
def test_the_lock_of_a_killed_process_does_not_block(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait(10)
    assert (tmp_path / "a" / NAME).exists()
    assert is_empty(tmp_path / "a")
    with run_directory("x", tmp_path / "a", force=False) as chosen:
        (chosen / "manifest.json").write_text("{}")
    assert not (tmp_path / "a" / NAME).exists()


@pytest.mark.faults
def test_a_writer_waits_for_a_baseline_and_names_a_writer_that_stays(tmp_path):
    store = Baseline(tmp_path / "baseline")
    with store.writing("the night of the test"):
        text = (tmp_path / "baseline" / NAME).read_text()
        assert text.startswith(f"the night of the test, pid {os.getpid()} on ")
        words = "in use by the night of the test, pid"
        with (
            pytest.raises(UsageError, match=words),
            held(store.root, f"baseline {store.root}", "another", wait_s=0.2),
        ):
            pass
    with store.writing("the next night"):
        pass


@pytest.mark.faults
def test_a_waiting_writer_gets_the_lock_when_it_is_free(holder, tmp_path):
    holder.stdin.close()
    with held(tmp_path / "a", "x", "the next", wait_s=10.0):
        wait_until(lambda: holder.poll() is not None, 10, "the holder has not ended")
        assert (tmp_path / "a" / NAME).read_text().startswith(f"the next, pid {os.getpid()} on ")
    assert is_empty(tmp_path / "a")


def test_two_default_names_of_the_same_second_differ(tmp_path):
    first, second = (reserved(tmp_path / "runs" / "nightly-1") for _ in range(2))
    assert [p.name for p in (first, second)] == ["nightly-1", "nightly-1-1"]
    assert first.is_dir()
    assert second.is_dir()


def test_a_directory_that_cannot_be_written_is_a_mistake_of_the_user(tmp_path):
    with (
        pytest.raises(UsageError, match="x: cannot be written"),
        held(tmp_path / "none", "x", "y"),
    ):
        pass
