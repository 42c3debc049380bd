"""Files of a new project: a scenario, a target, a nightly file and CI workflows.

The workflows install slobench from a git address with a commit, or from a wheel: no package index
has it, and a package of that name there would be another.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from loadgen.errors import UsageError
from targets.address import parse_url

SCENARIO = """\
# A chat service with many users: replace the numbers by your own (slobench fit TRACE).
schema: 1
name: chat
seed: 1
arrivals: {kind: poisson, rate: 4/s}                     # when requests arrive
requests:                                                # their lengths
  input_tokens: {kind: lognormal, median: 96, sigma: 0.6, max: 384}
  output_tokens: {kind: lognormal, median: 24, sigma: 0.5, max: 64}
phases: {warmup: 5s, measure: 60s, drain: 15s}
limits: {timeout: 20s, max_concurrency: 64}
slo:                                                     # limits that must hold
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

OWN_TARGET = """\
# The server under test. A key is read from the environment (OPENAI_API_KEY, or the variable that
# api_key_env names), never from this file.
url: @URL@
labels: {gpu: unknown, engine: unknown}
"""

WORKFLOW = """\
# Checks the scenario on every push and measures @WHAT@
name: slobench
on: [push, workflow_dispatch]
@ENV@
jobs:
  load-test:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
@INSTALL@
      - run: slobench validate slobench/chat.yaml
      - run: slobench run slobench/chat.yaml --target @TARGET@ --out runs/ci --junit runs/junit.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with: {name: slobench-report, path: runs}
"""

STEADY = """\
# The traffic of every night: gaps and lengths are equal, so that only the server can vary.
schema: 1
name: steady
seed: 7
arrivals: {kind: constant, rate: 3/s}
requests: {input_tokens: 128, output_tokens: 32}
phases: {warmup: 5s, measure: 30s, drain: 10s}
"""

NIGHTLY = """\
# The nightly measurement: slobench nightly slobench/nightly.yaml
# For a server of your own: slobench init --target URL
schema: 1
targets: [reference]
scenarios: [steady.yaml]
modes: [chunked]
engine: shape=10m
control: reference           # an unchanged server beside every run: the machine cancels out. To
                             # detect changes of the code, pin an older version: docs/nightly.md
repeats: 10
metrics: [p50(ttft), p50(tpot), error_rate]
margins: {default: 5%, error_rate: 1%}
baseline: baseline
"""

OWN_NIGHTLY = """\
# The nightly measurement: slobench nightly slobench/nightly.yaml
# Without a control, a slower machine or network looks like a slower server: docs/nightly.md
schema: 1
targets: [target.yaml]
scenarios: [steady.yaml]
repeats: 10
metrics: [p50(ttft), p50(tpot), error_rate]
margins: {default: 5%, error_rate: 1%}
baseline: baseline
"""

NIGHTLY_WORKFLOW = """\
# Measures every night; fails if it is worse than before, or could not be measured. The cache holds
# the baseline.
name: slobench nightly
on:
  schedule:
    - cron: "17 3 * * *"
  workflow_dispatch:
    inputs:
      accept:
        description: Take the last better or worse nights as the new level; measures nothing
        type: boolean
        default: false
concurrency: slobench-nightly
permissions:
  contents: read
@ENV@
jobs:
  nightly:
    runs-on: ubuntu-latest
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with: {python-version: "3.11"}
@INSTALL@
      - uses: actions/cache/restore@v4
        with:
          path: slobench/baseline
          key: slobench-baseline-${{ github.run_id }}
          restore-keys: slobench-baseline-
      - if: inputs.accept
        run: slobench nightly slobench/nightly.yaml --accept
      - if: ${{ !inputs.accept }}
        run: slobench nightly slobench/nightly.yaml --out runs/nightly
      - uses: actions/cache/save@v4
        if: always()
        with:
          path: slobench/baseline
          key: slobench-baseline-${{ github.run_id }}-${{ github.run_attempt }}
      - uses: actions/upload-artifact@v4
        if: ${{ always() && !inputs.accept }}
        with: {name: slobench-nightly, path: runs/nightly}
"""

_ENV = """\
env:
  # What pip installs: git+https://HOST/OWNER/REPOSITORY@COMMIT, or the URL or the path of a wheel.
  # Write it here, or set the repository variable SLOBENCH.
  SLOBENCH: ${{ vars.SLOBENCH@DEFAULT@ }}"""

_KEY = """
  # The key of the server, if it needs one: a secret of the repository.
  OPENAI_API_KEY: ${{ secrets.OPENAI_API_KEY }}"""

_INSTALL = """\
      - name: Install slobench
        run: |
          case "$SLOBENCH" in
            "") echo "::error::SLOBENCH is empty: see the first lines of this file"; exit 1 ;;
            *://*) python -m pip install "slobench@EXTRA@ @ $SLOBENCH" ;;
            *) python -m pip install "$SLOBENCH@EXTRA@" ;;
          esac"""


def write_starter(directory: Path, source: str = "", url: str = "") -> list[Path]:
    """Writes the files and returns their paths. They measure the server at `url`, without one the
    bundled engine. The workflows install slobench from `source` (`pinned`) unless a repository
    variable states another. Raises UsageError, and writes nothing, if a file exists; also if one
    cannot be written; TargetFileError for an unusable `url`."""
    if url:
        parse_url(url)
    default = f" || '{source}'" if source else ""
    marks = {
        "@ENV@": _ENV.replace("@DEFAULT@", default) + (_KEY if url else ""),
        "@INSTALL@": _INSTALL,
        "@EXTRA@": "" if url else "[engine]",
        "@WHAT@": "the server of slobench/target.yaml." if url else "the bundled engine with it.",
        "@TARGET@": "slobench/target.yaml" if url else "reference",
        "@URL@": json.dumps(url),
    }
    files = {
        "slobench/chat.yaml": SCENARIO,
        "slobench/target.yaml": OWN_TARGET if url else TARGET,
        "slobench/steady.yaml": STEADY,
        "slobench/nightly.yaml": OWN_NIGHTLY if url else NIGHTLY,
        ".github/workflows/slobench.yml": WORKFLOW,
        ".github/workflows/slobench-nightly.yml": NIGHTLY_WORKFLOW,
    }
    paths = {directory / name: _filled(text, marks) for name, text in files.items()}
    if there := [str(path) for path in paths if path.exists()]:
        raise UsageError(
            f"{', '.join(there)}: already there; nothing was written. Remove them, or name "
            "another directory: slobench init DIRECTORY"
        )
    try:
        for path, text in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return list(paths)


def _filled(text: str, marks: dict[str, str]) -> str:
    for mark, lines in marks.items():
        text = text.replace(mark, lines)
    return text


def pinned(source: str) -> str:
    """A source that pip installs the same from every time. Raises UsageError for a git address
    without a commit or tag, and for anything but a git address or a wheel."""
    is_plain = re.fullmatch(r"[\w.:/@+%~=?&#-]+", source) is not None
    last = source.rpartition("/")[2]
    if is_plain and source.startswith("git+") and re.search(r"@\w", last):
        return source
    if is_plain and last.partition("#")[0].endswith(".whl"):
        return source
    if source.startswith("git+"):
        raise UsageError(f"--install {source}: names no commit; write {source}@COMMIT")
    raise UsageError(
        f"--install {source}: expected git+https://HOST/OWNER/REPOSITORY@COMMIT or a wheel (.whl)"
    )


def own_source() -> str:
    """The git address and commit, or the URL of the wheel, that this slobench was installed from;
    "" for another source. Source: PEP 610."""
    try:
        record = json.loads(distribution("slobench").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return ""
    url, vcs = str(record.get("url", "")), record.get("vcs_info")
    if isinstance(vcs, dict) and vcs.get("vcs") == "git" and vcs.get("commit_id"):
        return f"git+{url}@{vcs['commit_id']}"
    is_wheel = url.startswith("https://") and url.endswith(".whl")
    return url if is_wheel else ""
