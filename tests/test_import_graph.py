"""The modules that a command line imports, as the interpreter lists them (-X importtime)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)")
THIRD_PARTY = {
    *("aiohttp", "annotated_types", "attr", "click", "hdrh", "httptools", "jinja2", "markdown_it"),
    *("msgspec", "numpy", "pandas", "prometheus_client", "pyarrow", "pydantic", "pydantic_core"),
    *("pygments", "rich", "scipy", "typer", "typing_extensions", "uvloop", "yaml"),
}


def imported(*words: str) -> tuple[str, list[str]]:
    """The output of a command line, and the modules that it imports, in their order."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "loadgen", *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
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
        "loadgen.endings",
        "loadgen.errors",
        "loadgen.shadowing",
    }
