"""A night of a few requests: the scenario and the file that the tests of nights share."""

from pathlib import Path

SCENARIO = """\
# A few requests, equally far apart.
schema: 1
name: few
seed: 7
arrivals: {kind: constant, rate: 5/s}
requests: {input_tokens: 64, output_tokens: 16}
phases: {measure: 2s, drain: 5s}
"""
FILE = """\
schema: 1
targets: [sim]
scenarios: [few.yaml]
modes: [chunked]
repeats: 2
"""


def write(folder: Path, more: str) -> Path:
    """The scenario and a nightly file with `more` lines in `folder`; the file's path."""
    (folder / "few.yaml").write_text(SCENARIO)
    path = folder / "nightly.yaml"
    path.write_text(FILE + more)
    return path
