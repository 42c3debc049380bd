"""The wheel in an empty environment: its content, its size, and a page without vl-convert-python.
Needs npm, a registry and a package index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.browser import chromium, needs_chromium

pytestmark = [pytest.mark.release, pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
MOST_BYTES = 575_000_000
needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this machine")


def run(*words: str | Path, cwd: Path, environ: Mapping[str, str] = os.environ) -> str:
    clean = {key: value for key, value in environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=clean, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def checkout(to: Path) -> Path:
    """The files of the working tree that git does not ignore, as a clone has them."""
    names = run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).split("\0")
    for name in filter(None, names):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, to / name)
    return to


def build(
    folder: Path, source: Path | None = None, environ: Mapping[str, str] = os.environ
) -> tuple[zipfile.ZipFile, str]:
    """The wheel of `source` (else of a checkout), and the output of its build."""
    tree = source or checkout(folder / "checkout")
    words = (sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", folder, tree)
    printed = run(*words, cwd=folder, environ=environ)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path), printed


def build_source(folder: Path) -> Path:
    """The source distribution of a checkout, by the hook that `python -m build` calls."""
    pip = (sys.executable, "-m", "pip", "install", "-q", "--target", folder / "tools")
    run(*pip, "setuptools>=77", cwd=folder)
    code = """if True:
        import sys
        sys.path[:0] = ["scripts", sys.argv[1] + "/tools"]
        import build_backend
        build_backend.build_sdist(sys.argv[1])
    """
    run(sys.executable, "-c", code, folder, cwd=checkout(folder / "checkout"))
    (path,) = folder.glob("*.tar.gz")
    return path


def without_npm(folder: Path) -> dict[str, str]:
    """An environment whose PATH has only these programs."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("git", "cc", "gcc", "sh"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    return {**os.environ, "PATH": str(programs)}


def required(wheel: zipfile.ZipFile) -> set[str]:
    """The names of the dependencies that are not of an extra."""
    lines = wheel.read("slobench-0.1.0.dist-info/METADATA").decode().splitlines()
    return {
        re.split(r"[<>=;!\[ ]", line.removeprefix("Requires-Dist: "))[0]
        for line in lines
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with build(tmp_path_factory.mktemp("with-npm"))[0] as opened:
        yield opened


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An environment with the wheel and its dependencies in their pinned versions."""
    folder = tmp_path_factory.mktemp("empty")
    run(sys.executable, "-m", "venv", "venv", cwd=folder)
    pip = (folder / "venv" / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "-q", "-c", ROOT / "constraints.txt", wheel.filename, cwd=folder)
    return folder / "venv"


@needs_npm
def test_the_wheel_has_the_script_and_every_licence(wheel):
    script = wheel.read("reports/static/vega.js").decode()
    assert re.match(r"/\* vega \d+\.\d+\.\d+, vega-lite [\d.]+, vega-embed [\d.]+; made", script)
    texts = wheel.read(
        "slobench-0.1.0.dist-info/licenses/reports/static/vega-licenses.txt"
    ).decode()
    assert texts == wheel.read("reports/static/vega-licenses.txt").decode()
    assert texts in script
    for holder in ("University of Washington", "Mike Bostock", "Observable, Inc."):
        assert holder in texts
    owners = set(
        re.findall(r"[\w/.-]+(?=[,:])", "\n".join(re.findall("^.*: Copyright.*$", texts, re.M)))
    )
    assert {"vega", "vega-lite", "vega-embed", "d3-array", "topojson-client", "semver"} <= owners
    assert "vl-convert-python" not in required(wheel)


@needs_npm
def test_the_base_installation_is_small_enough(installed):
    files = [path for path in installed.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not list(installed.glob("lib/python*/site-packages/vl_convert"))
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


@needs_npm
@needs_chromium
def test_a_run_writes_a_page_whose_figures_are_drawn(installed, tmp_path):
    line = ["quickstart", "--target", "sim", "--out", "run"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run(installed / "bin" / "slobench", "run", *line, cwd=tmp_path, environ=environ)
    with chromium() as browser:
        page = browser.new_page()
        problems: list[str] = []
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.goto(f"{(tmp_path / 'run' / 'report.html').as_uri()}#unfolded")
        page.wait_for_function("document.querySelectorAll('svg.marks').length > 3")
    assert problems == []


@needs_npm
def test_a_figure_file_names_the_extra(installed, tmp_path):
    slobench = installed / "bin" / "slobench"
    run(slobench, "run", "quickstart", "--target", "sim", "--out", "run", cwd=tmp_path)
    done = subprocess.run(
        [slobench, "report", "run", "--svg"], cwd=tmp_path, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "pip install 'slobench[figures]'" in done.stderr


@needs_npm
def test_a_build_from_the_source_distribution_needs_no_npm(tmp_path):
    wheel, _ = build(tmp_path, build_source(tmp_path), without_npm(tmp_path))
    with wheel:
        assert "reports/static/vega.js" in wheel.namelist()
        assert "vl-convert-python" not in required(wheel)


def test_a_build_without_npm_requires_vl_convert_and_prints_that(tmp_path):
    wheel, printed = build(tmp_path, environ=without_npm(tmp_path))
    assert "Vega is not in this build (npm is not in PATH)" in printed
    with wheel:
        assert "reports/static/vega.js" not in wheel.namelist()
        assert "vl-convert-python" in required(wheel)
