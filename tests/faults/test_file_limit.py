"""A limit of open files that is too low for the connections of a load process."""

import subprocess
import sys

import pytest

from loadgen.drive.file_limit import file_limit_problem

pytestmark = pytest.mark.faults


@pytest.mark.e2e
@pytest.mark.parametrize("limit", [40, 64])
def test_the_limit_of_open_files_is_named_with_the_number_needed(cli, tmp_path, limit):
    """200 requests/s of 0.3 s hold some 60 connections and more, which 64 files do not allow."""
    run = "-m loadgen run --target=mock --rate=200/s --input-len=8 --output-len=64 --duration=1s"
    ended = subprocess.run(
        ["sh", "-c", f"ulimit -n {limit}; exec {sys.executable} {run}"],
        cwd=tmp_path, env=cli.environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 3
    assert "open files" in ended.stderr
    assert f"the limit is {limit}: raise it with ulimit -n" in ended.stderr
    assert not list(tmp_path.glob("runs/*"))


def test_the_files_of_the_process_itself_count_too():
    assert file_limit_problem(24, 64) == ""
    assert file_limit_problem(25, 64) == (
        "a load-generating process needs 65 open files, 25 of them for connections, and the limit "
        "is 64: raise it with ulimit -n 65, or use more --workers"
    )
