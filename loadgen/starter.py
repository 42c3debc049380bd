"""The files a new project begins with: a scenario, a target, and a workflow that runs it in CI."""

from __future__ import annotations

from pathlib import Path

from loadgen.errors import UsageError

SCENARIO = """\
# A chat service that many people use at once: replace the numbers by your own (slobench fit TRACE).
schema: 1
name: chat
seed: 1
arrivals: {kind: poisson, rate: 4/s}                     # who comes, and when
requests:                                                # what they ask
  input_tokens: {kind: lognormal, median: 96, sigma: 0.6, max: 384}
  output_tokens: {kind: lognormal, median: 24, sigma: 0.5, max: 64}
phases: {warmup: 5s, measure: 60s, drain: 15s}
limits: {timeout: 20s, max_concurrency: 64}
slo:                                                     # what they were promised
  - ttft <= 1s
  - tpot <= 200ms
  - attainment >= 95%
"""

TARGET = """\
# The server under test. A key is read from the environment (OPENAI_API_KEY, or the variable that
# api_key_env names), never from this file.
url: http://localhost:8000
api: chat
labels: {gpu: none, engine: unknown}
"""

WORKFLOW = """\
# Checks the scenario on every push and measures the bundled engine with it; point --target at
# slobench/target.yaml to measure a server of your own.
name: slobench
on: [push, workflow_dispatch]
jobs:
  load-test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
      - run: pip install 'slobench[engine]'
      - run: slobench validate slobench/chat.yaml
      - run: slobench run slobench/chat.yaml --target reference --out runs/ci
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: slobench-report, path: runs/ci}
"""

FILES = {
    "slobench/chat.yaml": SCENARIO,
    "slobench/target.yaml": TARGET,
    ".github/workflows/slobench.yml": WORKFLOW,
}
"""Path inside the project → content."""


def write_starter(directory: Path) -> list[Path]:
    """Write the files and return their paths. Raises UsageError, and writes nothing, where one of
    them is there already or cannot be written."""
    paths = {directory / name: text for name, text in FILES.items()}
    if there := [str(path) for path in paths if path.exists()]:
        raise UsageError(f"{', '.join(there)}: already there; nothing was written")
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return list(paths)
