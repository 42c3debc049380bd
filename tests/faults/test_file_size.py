"""Files that cannot be written to their end: a full disk, or a limit of their size (ulimit -f)."""

import errno
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from loadgen.archive import store
from loadgen.archive.directory import keep_elsewhere, run_directory
from loadgen.cli.exit_codes import guarded
from loadgen.records import CHUNKS, REQUESTS, Names, Status
from loadgen.system.whole_file import replacing
from tests.runs import measured_run, write_to

pytestmark = pytest.mark.faults


def fail(path, error):
    with replacing(path) as partial:
        partial.write_text("ne")
        raise error


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    with replacing(path) as partial:
        partial.write_text("old")
    with pytest.raises(OSError, match="No space left on device") as failed:
        fail(path, OSError(errno.ENOSPC, "No space left on device"))
    assert failed.value.filename == str(path)
    with pytest.raises(ValueError, match="odd"):
        fail(path, ValueError("odd"))
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_rows_that_a_killed_worker_had_half_written_are_not_read(tmp_path):
    rows, chunks = np.zeros(1, REQUESTS), np.zeros(0, CHUNKS)
    store.write_part(tmp_path / "shard-0.npz", rows, chunks, Names())
    whole = (tmp_path / "shard-0.npz").read_bytes()
    with replacing(tmp_path / "shard-1.npz") as partial:
        partial.write_bytes(whole)
    (tmp_path / "shard-1.npz").unlink()
    partial.write_bytes(whole[:100])  # as after kill -9
    assert len(store.read_parts(tmp_path)) == 1


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("kib", "file", "exit_code"), [(4, "manifest.json", 3), (60, "report.html", 2)]
)
def test_a_limit_of_the_file_size_is_named_with_the_file(cli, tmp_path, kib, file, exit_code):
    run = "-m loadgen run --target=mock --rate=20/s --input-len=8 --output-len=8 --duration=1s"
    ended = subprocess.run(
        ["bash", "-c", f"ulimit -f {kib}; exec {sys.executable} {run} --out=run"],
        cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == exit_code, ended.stderr
    assert f"run/{file}: " in ended.stderr
    assert "File too large" in ended.stderr
    assert not list(tmp_path.rglob("*.partial"))
    if file == "report.html":
        assert "slobench report run" in ended.stderr
        assert cli("report", "run", cwd=tmp_path).returncode in (0, 1, 3)
        assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="`ulimit -f` counts in KiB")
def test_rows_that_the_run_directory_cannot_hold_are_kept_where_the_message_says(cli, tmp_path):
    words = "-m loadgen run --target=mock --rate=200/s --input-len=8 --output-len=32 --duration=3s"
    ended = subprocess.run(
        ["bash", "-c", f"ulimit -f 64; exec {sys.executable} {words} --out=run"],
        cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
    assert "run/chunks.parquet: " in ended.stderr
    note = re.search(r"all (\d+) recorded rows are kept: slobench report (.*)", ended.stderr)
    assert note is not None, ended.stderr
    kept = Path(note[2])
    assert cli("report", kept, cwd=tmp_path).returncode in (0, 3)
    rows = store.read_run(kept).request_rows
    assert len(rows) == int(note[1]) > 500
    assert (rows["status"] == Status.ok).all()


def test_a_run_that_cannot_be_written_is_written_into_another_directory(tmp_path):
    run = measured_run(n_requests=40)
    whole = write_to(tmp_path / "run", run)
    with pytest.raises(OSError, match="No space left") as failed:
        fail_to_write(tmp_path / "run", whole, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    note = f"all 40 recorded rows are kept: slobench report {kept}"
    assert failed.value.__notes__ == [note]
    assert store.read_run(kept).request_rows.tobytes() == whole.request_rows.tobytes()


def test_rows_that_can_be_written_nowhere_are_counted(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    run = measured_run(n_requests=40)
    parts = tmp_path / "run" / "parts"
    parts.mkdir(parents=True)
    store.write_part(parts / "shard-0.npz", run.request_rows[:15], run.chunk_rows[:0], run.names)
    with pytest.raises(OSError, match="No space left") as failed:
        fail_to_write(tmp_path / "run", run, tmp_path / "file")
    places = f"{tmp_path / 'run'}, {tmp_path / 'file'}, {tmp_path / 'file'}"
    assert failed.value.__notes__ == [
        f"25 recorded rows are lost: they cannot be written to {places}"
    ]


def fail_to_write(directory, run, cache_dir):
    with keep_elsewhere(directory, run, cache_dir):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_the_rows_that_a_failed_run_keeps_are_counted(tmp_path):
    run = measured_run(n_requests=40)
    with pytest.raises(OSError, match="No space left") as failed:
        fail_after_recording(tmp_path / "run", run)
    assert failed.value.__notes__ == [
        f"15 recorded rows are kept: slobench report {tmp_path / 'run'}"
    ]


def fail_after_recording(directory, run):
    with run_directory("a", directory, force=False) as chosen:
        write_to(chosen, run)
        (chosen / "requests.parquet").unlink()
        parts = chosen / "parts"
        parts.mkdir()
        lost = run.request_rows[15:20].copy()
        lost["status"] = Status.lost
        store.write_part(
            parts / "shard-0.npz",
            np.concatenate([run.request_rows[:15], lost]),
            run.chunk_rows[:0],
            run.names,
        )
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (MemoryError(), 3),
        (ImportError("a.so: failed to map segment from shared object"), 3),
        (ImportError("a.so: cannot allocate memory in static TLS block"), 3),
        (RuntimeError("can't start new thread"), 3),
        (ImportError("no module named a"), 4),
        (RuntimeError("another"), 4),
    ],
)
def test_a_lack_of_memory_is_a_fault_of_the_machine(error, exit_code, tmp_path, capsys):
    def body():
        raise error

    assert guarded(body, {"XDG_CACHE_HOME": str(tmp_path)}) == exit_code
    assert ("out of memory" in capsys.readouterr().err) == (exit_code == 3)


@pytest.mark.e2e
@pytest.mark.skipif(sys.platform != "linux", reason="`ulimit -v` is not enforced elsewhere")
@pytest.mark.parametrize("mib", [40, 150, 260, 510])
def test_a_limit_of_the_address_space_is_a_fault_of_the_machine(cli, tmp_path, mib):
    run = "-m loadgen run --target=mock --rate=20/s --input-len=8 --output-len=8 --duration=1s"
    ended = subprocess.run(
        ["bash", "-c", f"ulimit -v {mib << 10}; exec {sys.executable} {run} --out=run"],
        cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
    assert "slobench: out of memory: raise the limit (ulimit -v), or send less" in ended.stderr
