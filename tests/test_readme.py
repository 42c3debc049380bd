"""README.md: the first screen, its figures, and its commands against the built wheel."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import needs_chromium
from tests.test_docs import command_lines, without_code

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
VLLM_PAGE = (ROOT / "docs" / "coming-from-vllm-bench.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
NOT_PACKAGED = (".venv", ".git", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


def test_the_first_screen_has_the_sentence_the_picture_the_installation_and_the_commands():
    lines = README.splitlines()
    assert len(lines) <= 60
    assert lines[0].endswith("before it breaks its latency SLO.")
    first = "\n".join(lines[:20])
    assert "](docs/capacity.png)" in first
    assert "pip install ." in first
    assert "slobench capacity --target http://localhost:8000 --input-len 512" in first
    assert "make test" in first


def test_the_lines_after_make_demo_begin_with_the_environment_that_it_makes():
    lines = README.splitlines()
    after = next(k for k, line in enumerate(lines) if line.startswith("    make demo"))
    assert lines[after + 1] == "    . .venv/bin/activate"
    assert "BIN := .venv/bin" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_picture_is_a_png_of_at_most_150_kb():
    content = (ROOT / "docs" / "capacity.png").read_bytes()
    width, height = size_of_png(content)
    assert width >= 800
    assert height >= 400
    assert len(content) <= 150_000


def size_of_png(content: bytes) -> tuple[int, int]:
    """Width and height in pixels. Source: PNG specification, 11.2.1 (IHDR)."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.e2e
@needs_chromium
def test_the_script_makes_the_picture_from_a_report(tmp_path):
    line = "slobench capacity quickstart --target sim --budget 5m --out found"
    found = slobench(line, tmp_path, ROOT)
    assert found.returncode == 0, found.stderr
    words = ["--report", "found/report.html", "--to", "made.png"]
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "readme_picture.py"), *words],
        cwd=tmp_path, check=True, timeout=100,
    )  # fmt: skip
    width, height = size_of_png((tmp_path / "made.png").read_bytes())
    assert width == 1290  # 860 CSS pixels, 1.5 device pixels each
    assert height > 600


def test_the_figures_of_the_readme_stand_in_the_results_of_the_benchmarks():
    ceiling = json.loads((RESULTS / "generator_ceiling.json").read_text())["saturated, 1 per write"]
    stated = re.search(r"on one core: ([\d ]+); [^:]*: ([\d ]+) \(", README)
    assert stated is not None
    for text, side in zip(stated.groups(), ("slobench", "aiohttp"), strict=True):
        measured = ceiling[side]["events/s"]["median"]
        assert int(text.replace(" ", "")) == round(measured, -3)


@pytest.mark.e2e
def test_a_late_client_shows_the_figures_of_the_readme(tmp_path):
    """The commands of the page about vllm bench, in virtual time."""
    section = VLLM_PAGE.partition("## A client that falls behind")[2].partition("## ")[0]
    run, rescore = command_lines(section)
    done = slobench(run, tmp_path, ROOT)
    assert done.returncode == 1, done.stderr
    printed = slobench(rescore, tmp_path, ROOT).stdout
    own, vllm = re.findall(r"^TTFT +(?:slobench|vllm) .*$", printed, re.MULTILINE)
    for row, p50, p99 in ((own, "1.96 s", "3.15 s"), (vllm, "11.5 ms", "16 ms")):
        assert p50 in row
        assert row.endswith(p99)
        assert f"{p50} | {p99} |" in section
        assert p99 in without_code(README)


def slobench(line: str, cwd: Path, packages: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command line with the packages of a directory, not those that are installed."""
    words = shlex.split(line)
    assert words[0] == "slobench"
    code = "from loadgen.cli.main import main; main()"
    environ = {**os.environ, "PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(cwd / "cache"),
               "PYTHONSAFEPATH": "1", "COLUMNS": "160"}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code, *words[1:]],
        cwd=cwd, env=environ, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the content of the wheel that `pip install .` builds. Skips where pip finds
    no index for the build's setuptools."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "checkout", ignore=shutil.ignore_patterns(*NOT_PACKAGED))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    built = subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "-w", str(folder), "--retries", "1", "./checkout"],
        cwd=folder, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    if built.returncode and "No matching distribution found for setuptools" in built.stderr:
        pytest.skip(f"no package index here: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    to = folder / "installed"
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--target", str(to), str(path)], check=True, cwd=folder
    )
    return to


@pytest.mark.e2e
def test_the_installed_wheel_searches_a_capacity_and_writes_the_page(wheel, tmp_path):
    """The command of the README, against the simulator instead of a server."""
    (typed,) = (line for line in command_lines(README) if line.startswith("slobench capacity"))
    line = typed.replace("http://localhost:8000", "sim --engine shape=8b,hardware=h200 --out found")
    done = slobench(line, tmp_path, wheel)
    assert done.returncode == 0, done.stderr
    assert re.match(r"CAPACITY between \d+ and \d+ req/s; promise \d+\n", done.stdout)
    page = (tmp_path / "found" / "report.html").read_text(encoding="utf-8")
    assert "Capacity: the highest load that meets the SLO" in page


@pytest.mark.e2e
def test_the_wheel_holds_the_files_that_are_not_python(wheel, tmp_path):
    for folder, pattern in (
        ("scenarios", "*.yaml"),
        ("reports/templates", "*.j2"),
        ("reports/static", "*"),
        ("targets/truth", "*.c"),
        ("reference_engine/smdp/tables", "*.json"),
        ("loadgen/web/static", "*"),
    ):
        names = {path.name for path in (ROOT / folder).glob(pattern) if path.is_file()}
        assert names
        assert names <= {path.name for path in (wheel / folder).glob(pattern)}, folder
    printed = slobench("slobench list arrivals --json", tmp_path, wheel).stdout
    assert {"poisson", "hawkes"} <= {entry["kind"] for entry in json.loads(printed)["arrivals"]}
