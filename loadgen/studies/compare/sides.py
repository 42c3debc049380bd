"""Reads the sides of a comparison, its margins and its noise floor from flags and files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgen.archive.names import directory_of
from loadgen.archive.store import read_run
from loadgen.cli.parse import in_per_cent
from loadgen.errors import UsageError, nearest
from loadgen.measure.measures import Measured, measure
from loadgen.studies.compare.contrast import Noise
from loadgen.studies.compare.judgement import FAIL_ON, POWER
from loadgen.system.whole_file import read_result
from loadgen.units import parse_share


def read_side(text: str) -> list[Measured]:
    """The runs of one side: names or directories separated by commas, each a run or a folder of
    runs. Raises UsageError for none."""
    names = [name for name in text.split(",") if name]
    directories = [run for name in names for run in _runs_in(directory_of(name))]
    if not directories:
        raise UsageError(f"{text!r} names no run")
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise UsageError(f"{text!r} names a run twice")
    return [Measured(read_run(directory), str(directory)) for directory in directories]


def _runs_in(path: Path) -> list[Path]:
    if (path / "manifest.json").is_file():
        return [path]
    inside = sorted(p.parent for p in path.glob("*/manifest.json") if not p.parent.is_symlink())
    if not inside:
        raise UsageError(f"{path}: {_no_runs(path)}")
    return inside


def _no_runs(path: Path) -> str:
    """The reason why a directory cannot be compared, and the directory to name instead."""
    if _is_of_a_baseline(path):
        return (
            "is a nightly baseline, which holds a few numbers per run but not the requests that "
            "compare needs; name the cells of two nights (written by `nightly --out`, e.g. "
            "runs/nightly-…/<cell>), or compare with `slobench nightly`"
        )
    if (path / "capacity.json").is_file():
        return (
            "is a capacity search, whose runs differ in their load; compare one of its probes with "
            f"another ({path / 'probes'}/…), or print both results: slobench report A B"
        )
    deeper = sorted({run.parent.parent.name for run in path.glob("*/*/manifest.json")})
    if deeper:
        return f"its runs are one folder deeper; name one of: {', '.join(deeper)}"
    return "neither a run directory nor a folder of runs (no manifest.json)"


def _is_of_a_baseline(path: Path) -> bool:
    """Whether a path is in the baseline store of `slobench nightly`."""
    cells = (path, path.parent, path.parent.parent, *(k.parent for k in path.glob("*/key.json")))
    return any((cell / "key.json").is_file() and (cell / "nights").is_dir() for cell in cells)


def read_margins(texts: Sequence[str]) -> dict[str, float]:
    """`5%` for every measure, `p99(ttft)=10%` for one."""
    margins: dict[str, float] = {}
    for text in texts:
        name, equals, share = text.rpartition("=")
        key = measure(name).text if equals else ""
        try:
            margins[key] = parse_share(in_per_cent(share))
        except ValueError as error:
            raise UsageError(f"--margin {text}: {error}") from None
        if not 0 < margins[key] < 1:
            raise UsageError(f"--margin {text}: expected a share between 0 % and 100 %")
    return margins


def noise_json(runs: Sequence[Measured], noise: Mapping[str, Noise]) -> dict[str, object]:
    """A noise floor in the format that `--noise` reads."""
    return {
        "schema": 1,
        "kind": "noise",
        "runs": [run.name for run in runs],
        "measures": {text: {"sd": found.sd, "df": found.df} for text, found in noise.items()},
        "power": POWER,
    }


def read_noise(path: Path) -> dict[str, Noise]:
    """The noise floor from the output of `slobench compare --aa … --json`. Raises UsageError."""
    try:
        content = json.loads(read_result(path))
        measures = content["measures"]
        return {measure(t).text: Noise(float(n["sd"]), float(n["df"])) for t, n in measures.items()}
    except OSError as error:
        raise UsageError(f"--noise {path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "" if path.is_symlink() else f" ({error!r})"  # no content behind a link
        raise UsageError(
            f"--noise {path}: not the output of `slobench compare --aa RUNS --json`{reason}"
        ) from None


def read_fail_on(verdict: str | None) -> str | None:
    """A verdict of --fail-on. Raises UsageError."""
    if verdict is not None and verdict not in FAIL_ON:
        raise UsageError(f"--fail-on: unknown verdict '{verdict}'; {nearest(verdict, FAIL_ON)}")
    return verdict
