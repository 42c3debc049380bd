"""The surroundings of a run, without a process for each of them."""

import os
import platform
import subprocess
import sys

import pytest

from loadgen.drive.instrument import host
from loadgen.run.manifest import git_commit

NAME = ("-c", "user.name=n", "-c", "user.email=e@x")


def git(folder, *words):
    return subprocess.run(
        ["git", *NAME, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "first")
    return folder


def test_the_commit_is_gits_in_every_form_of_repository(repository, tmp_path):
    inner = repository / "inner"
    inner.mkdir()
    assert git_commit(inner) == git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "second")
    git(repository, "commit", "-q", "--allow-empty", "-m", "third")
    for packed in (False, True):
        if packed:
            git(repository, "pack-refs", "--all")
        trees = (repository, tmp_path / "tree")
        commits = [git_commit(tree) for tree in trees]
        assert commits == [git(tree, "rev-parse", "HEAD") for tree in trees]
        assert len(set(commits)) == 2
    git(repository, "checkout", "-q", "--detach", "HEAD")
    assert git_commit(repository) == git(repository, "rev-parse", "HEAD")


def test_there_is_no_commit_without_a_repository_or_before_the_first(tmp_path):
    assert git_commit(tmp_path) == ""
    git(tmp_path, "init", "-q")
    assert git_commit(tmp_path) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere platform.platform() is called")
def test_the_platform_is_named_as_before():
    assert host().platform == platform.platform()


def test_the_surroundings_start_no_process(repository):
    """The audit events of the interpreter show every process that it starts."""
    program = (
        "import sys\n"
        "from loadgen.run.manifest import surroundings\n"
        "started = []\n"
        "def hook(name, args):\n"
        "    if name == 'subprocess.Popen':\n"
        "        started.append(args[0])\n"
        "sys.addaudithook(hook)\n"
        "commit = surroundings().git\n"
        "print(commit, started)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert printed.split(maxsplit=1) == [git(repository, "rev-parse", "HEAD"), "[]\n"]
