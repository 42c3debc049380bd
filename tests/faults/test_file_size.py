"""Files that cannot be written to their end: a full disk, or a limit of their size (ulimit -f)."""

import errno
import subprocess
import sys

import numpy as np
import pytest

from loadgen.archive import store
from loadgen.cli.exit_codes import guarded
from loadgen.records import CHUNKS, REQUESTS, Names
from loadgen.whole_file import replacing

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
