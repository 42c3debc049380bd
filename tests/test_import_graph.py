"""The modules that a command line imports, as the interpreter lists them (-X importtime). Modules
by `importlib.import_module` are not listed; what they import is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from loadgen.cli.lazy_verbs import VERBS
from loadgen.run.execute import execute
from loadgen.run.run_options import RunOptions
from loadgen.workload.scenario import load_scenario
from tests.runs import measured_run, write_to

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)")
THIRD_PARTY = {
    *("aiohttp", "annotated_types", "attr", "click", "hdrh", "httptools", "jinja2", "markdown_it"),
    *("msgspec", "numpy", "pandas", "prometheus_client", "pyarrow", "pydantic", "pydantic_core"),
    *("pygments", "rich", "scipy", "typer", "typing_extensions", "uvloop", "yaml"),
}

HEAVY = {"jinja2", "pandas", "prometheus_client", "pyarrow", "scipy"}


def imported(*words: str) -> tuple[str, list[str]]:
    """The output of a command line, and the modules that it imports, in their order."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "loadgen", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    assert done.returncode in (0, 3), done.stderr  # 3: no verdict, for lack of an SLO
    return done.stdout, LINE.findall(done.stderr)


def packages(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_the_version_is_printed_without_third_party_packages():
    output, modules = imported("--version")
    assert output == "slobench 0.1.0\n"
    assert not packages(modules) & THIRD_PARTY
    assert {module for module in modules if module.startswith("loadgen")} == {
        "loadgen",
        "loadgen.cli",
        "loadgen.cli.exit_codes",
        "loadgen.cli.main",
        "loadgen.cli.standard_streams",
        "loadgen.errors",
        "loadgen.system",
        "loadgen.system.endings",
        "loadgen.system.shadowing",
    }


def test_the_help_page_shows_every_verb_and_imports_the_module_of_none():
    output, modules = imported("--help")
    panels = dict.fromkeys(re.findall(r"^╭─ (.*?) ─", output, re.MULTILINE))
    assert list(panels) == ["Options", "Measure", "Decide", "Engine lab", "Scale", "Extend"]
    assert re.findall(r"^│ ([a-z]+)  ", output, re.MULTILINE) == list(VERBS)
    assert not set(modules) & set(VERBS.values())
    assert "numpy" not in packages(modules)
    assert {module for module in modules if module.startswith("loadgen.cli.")} == {
        "loadgen.cli.app",
        "loadgen.cli.exit_codes",
        "loadgen.cli.lazy_verbs",
        "loadgen.cli.main",
        "loadgen.cli.standard_streams",
    }


AT_CONNECT = """
import os, sys
original = os.getpid()
def audit(event, arguments):
    if event == "socket.connect" and os.getpid() == original:
        print("modules:", *sys.modules)
        sys.stdout.flush()
        os._exit(0)
sys.addaudithook(audit)
from loadgen.cli.main import main
main()
"""


def test_the_preflight_begins_before_modules_of_other_runs_and_of_results(tmp_path):
    """The first connection of a run, to a server that need not exist: the modules until then delay
    every run. Each of our modules costs about 0.9 ms, so a higher number needs a reason."""
    words = ["run", "--target=http://127.0.0.1:9", "--rate=5/s", "--duration=20s", "--input-len=8"]
    words += ["--output-len=4", "--slo=p99(ttft)<=1s", f"--out={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-c", AT_CONNECT, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)},
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("modules: "))
    modules = line.split()[1:]
    assert not packages(modules) & HEAVY, done.stderr
    assert not {name for name in modules if name in LATE}, done.stderr
    assert sum(name.split(".")[0] in {"loadgen", "reports", "targets"} for name in modules) <= 142


LATE = {
    "loadgen.measure.aggregate",
    "loadgen.measure.statistics.dependence",
    "loadgen.run.recording",
    "loadgen.workload.agents.corpus",
    "loadgen.workload.agents.plays",
    "loadgen.workload.preview",
    "loadgen.workload.traces.hashed",
    "loadgen.workload.traces.json_lines",
    "numpy.fft",
    "numpy.ma",
    "rich.live",
}
"""Modules of other traffic, of the run itself, and of its result."""


@pytest.mark.e2e
def test_a_run_imports_what_its_page_needs_after_its_preflight_has_begun(tmp_path):
    """And pandas and scipy never: from the command line to the page it needs neither."""
    words = ["--rate=20/s", "--duration=1s", "--input-len=8", "--output-len=4"]
    _, modules = imported("run", "--target=mock", *words, f"--out={tmp_path / 'run'}")
    assert (tmp_path / "run" / "report.html").is_file()
    n_modules = {name: sum(module.split(".")[0] == name for module in modules) for name in HEAVY}
    assert n_modules["pandas"] == n_modules["scipy"] == n_modules["prometheus_client"] == 0
    begun = modules.index("loadgen.live.early_warning")  # at the first token of the preflight
    page = "jinja2.environment", "reports.run.frames"
    for late in ("pyarrow.lib", "rich.live", "numpy.ma.core", *page):
        assert modules.index(late) > begun, late


def test_the_end_of_a_run_needs_no_module_that_is_not_imported_before(tmp_path):
    write_to(tmp_path / "run", measured_run())
    code = (
        "import sys; from importlib import import_module; from pathlib import Path\n"
        "from loadgen.run.preload import MODULES, Preload\n"
        "preload = Preload()\n"
        "for _ in MODULES: preload.step()\n"
        "before = set(sys.modules)\n"
        "from loadgen.archive.store import read_run\n"
        "from loadgen.run.conclude import summarized\n"
        f"directory = Path({str(tmp_path / 'run')!r})\n"
        "summarized(read_run(directory), directory, None, None, directory)\n"
        "print(*set(sys.modules) - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    later = {name for name in done.stdout.split() if "." not in name or name.startswith("numpy.")}
    assert (tmp_path / "run" / "report.html").is_file()
    assert not later & {*HEAVY, "numpy.fft", "numpy.ma"}, later
    assert not {name for name in done.stdout.split() if name.startswith(("loadgen", "reports"))}


def test_a_run_hands_over_its_summary_before_it_makes_the_page(tmp_path):
    found = []

    def on_summary(summary, directory):
        names = {path.name for path in directory.iterdir()}
        found.append((summary.verdict, "summary.json" in names, "report.html" in names))

    settings = ["arrivals.rate=5/s", "phases.measure=2s"]
    scenario = load_scenario("quickstart", settings)
    options = RunOptions(out_dir=tmp_path / "run")
    finished = execute(scenario, "sim", options, Console(quiet=True), on_summary=on_summary)
    assert found == [(finished.summary.verdict, True, False)]
    assert (tmp_path / "run" / "report.html").is_file()
