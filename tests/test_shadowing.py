"""Packages of slobench's names that belong to others are named at once."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.system.shadowing import TOP_LEVEL, problem, sharing

ROOT = Path(__file__).parents[1]


def run(code, cwd, *path):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=cwd, env=environ, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip


def other_distribution(folder, package):
    """A distribution `other-tool` with a package of our name, as pip installs it."""
    (folder / package).mkdir(parents=True)
    (folder / package / "__init__.py").write_text("")
    info = folder / "other_tool-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tool\nVersion: 1.0\n")
    (info / "top_level.txt").write_text(f"{package}\n")
    return folder


def test_every_package_here_is_our_own():
    assert problem() is None
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} | {"slobench"} == {*TOP_LEVEL}


@pytest.mark.parametrize("code", ["import slobench", "from loadgen.cli.main import main; main()"])
def test_the_import_and_the_command_line_name_the_other_distribution(tmp_path, code):
    before = other_distribution(tmp_path / "site", "reports")
    done = run(code, tmp_path, before)
    assert done.returncode == 1
    assert f"the package 'reports' in {before / 'reports'} is not slobench's" in done.stderr
    assert "it belongs to other-tool" in done.stderr


def test_a_file_of_ones_own_is_named_too(tmp_path):
    (tmp_path / "targets.py").write_text("")
    done = run("import slobench", tmp_path, tmp_path)
    assert f"'targets' in {tmp_path} is not slobench's; it belongs to a file of yours" in (
        done.stderr
    )


def test_another_loadgen_is_named_by_the_import(tmp_path):
    """An editable installation finds its own modules below the other package; others do not."""
    done = run("import slobench", tmp_path, other_distribution(tmp_path / "site", "loadgen"))
    assert done.returncode == 1
    named = r"the package 'loadgen' (in \S+ is not slobench's|belongs to another distribution)"
    assert re.search(named, done.stderr), done.stderr


def test_distributions_that_share_a_package_are_found():
    owners = {"reports": ["slobench", "x"], "targets": ["slobench", "slobench"], "other": ["y"]}
    assert sharing(owners) == {"reports": ["x"]}
