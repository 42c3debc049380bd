"""The stages of the GPU suite: each part in a process of its own, merged into one result per
device.

A CUDA error stays in its process, so it ends one part only. The merged JSON is at most a second
behind the rows of the running part, so a killed stage loses nothing that was measured.
"""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from rig.gpu_results import combined, markdown, replace_file, to_json
from rig.machine import machine

ROOT = Path(__file__).parents[2]
CEILINGS = "ceilings"
STAGE_S = 420.0
# The parts of each stage with the most seconds that each may take, the most useful first. Every
# stage measures the ceilings: the shares of its other parts refer to them.
STAGES: Mapping[int, Mapping[str, float]] = {
    1: {CEILINGS: 30, "kernels": 75, "decode_steps": 90, "tests": 125, "throughput": 75},
    2: {
        CEILINGS: 30,
        "long_answers": 40,
        "generate_batch": 90,
        "generate": 70,
        "http": 80,
        "modes": 90,
    },
    3: {
        CEILINGS: 30,
        "mixed_contexts": 50,
        "sweep": 75,
        "sanitizer": 75,
        "long": 140,
        "experiments": 30,
    },
}
PARTS = tuple(dict.fromkeys(name for parts in STAGES.values() for name in parts))
TGZ_BYTES = 16 << 20
_LEAST_S = 10.0  # a part with less time is not started
_GRACE_S = 8.0  # for a part to stop its own processes
_POLL_S = 1.0
_READINGS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "utilization.gpu")
_CONSTANTS = ("driver_version", "power.limit", "clocks.max.sm", "memory.total")

Command = Callable[[str, Path, Path, Path], Sequence[str]]
"""The command of a part: (its name, the file for its result, the merged result, the folder for its
logs)."""


def device_name() -> str | None:
    """The first GPU's name by `nvidia-smi`; None without a driver."""
    lines = _query(("name",))
    return lines[0][0] if lines else None


def slug(device: str) -> str:
    """A short name for files: `h100` of `NVIDIA H100 80GB HBM3`, `rtx-4090` of `NVIDIA GeForce RTX
    4090`."""
    words = [word for word in device.lower().split() if word not in ("nvidia", "tesla", "geforce")]
    for n, word in enumerate(words, 1):
        if re.search(r"\d", word):
            return re.sub(r"[^a-z0-9]+", "-", "-".join(words[:n]))
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words)) or "gpu"


def commit() -> str:
    """$SLOBENCH_COMMIT, for a copy without its history; else git's HEAD; else `unknown`."""
    from_environment = os.environ.get("SLOBENCH_COMMIT")
    if from_environment:
        return from_environment
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:  # there is no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def _query(names: Sequence[str]) -> list[list[str]]:
    """The rows of `nvidia-smi --query-gpu`; none if it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [row for row in rows if len(row) == len(names)] if done.returncode == 0 else []


@contextmanager
def sampled(log: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """Samples clocks, power and temperature twice a second during the block. The yielded function
    returns {reading: {median, min, max}} of the samples so far, with constants of the device; {}
    without `nvidia-smi`."""
    constants = _query(_CONSTANTS)
    known = dict(zip(_CONSTANTS, constants[0], strict=True)) if constants else {}
    command = [
        *("nvidia-smi", f"--query-gpu={','.join(_READINGS)}"),
        *("--format=csv,noheader,nounits", "-lms", "500"),
    ]
    with log.open("w", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)
        except OSError:
            yield dict
            return
        try:
            yield lambda: known | readings(log.read_text(encoding="utf-8"))
        finally:
            process.terminate()
            process.wait()


def readings(text: str) -> dict[str, dict[str, float]]:
    """Median, minimum and maximum of each reading in samples by `nvidia-smi`. Readings that the
    device does not support, such as `[N/A]`, are left out."""
    columns: dict[str, list[float]] = {}
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_READINGS):
            for name, cell in zip(_READINGS, row, strict=True):
                if re.fullmatch(r"\d+(\.\d+)?", cell.strip()):
                    columns.setdefault(name, []).append(float(cell))
    return {
        name: {"median": statistics.median(cells), "min": min(cells), "max": max(cells)}
        for name, cells in columns.items()
    }


@dataclass
class Merged:
    """The result of a device: a JSON file, a Markdown table and an archive with the logs, all
    replaced after each part. A part that runs again replaces its result; the earlier result moves
    to `earlier`."""

    out: Path
    stem: str
    content: dict[str, Any]

    @classmethod
    def start(cls, device: str, out: Path, resumed: Path | None = None) -> Merged:
        """A new result, or the one in `resumed`, which may lie in another folder. Raises UsageError
        if that file cannot be read or is of another device, and if a new result would replace a
        file."""
        today = datetime.now(UTC).date().isoformat()
        if resumed is None:
            stem = f"gpu-{slug(device)}-{today}"
            if (out / f"{stem}.json").exists():
                raise UsageError(
                    f"{out / stem}.json exists; add to it with --resume {out / stem}.json"
                )
            content = {
                "device": device,
                "date": today,
                "machine": machine(),
                "missing": list(PARTS),
                "parts": {},
                "earlier": [],
            }
            return cls(out, stem, content)
        try:
            content = json.loads(resumed.read_text(encoding="utf-8"))
            earlier_device = content["device"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"--resume {resumed}: not a result of the suite: {error}") from error
        if earlier_device != device:
            raise UsageError(
                f"--resume {resumed}: it is of {earlier_device}, this device is {device}"
            )
        return cls(out, resumed.stem, content)

    @property
    def path(self) -> Path:
        return self.out / f"{self.stem}.json"

    def is_done(self, name: str) -> bool:
        """Whether the part ran to its end without a failure."""
        part = self.content["parts"].get(name)
        return part is not None and part["state"] == "done" and not part["failures"]

    def put(self, name: str, record: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Set the record of a part and write. `is_new` moves the earlier record away."""
        parts = self.content["parts"]
        if is_new and name in parts:
            self.content["earlier"].append({"part": name, **parts[name]})
        parts[name] = dict(record)
        self.content["missing"] = [part for part in PARTS if part not in parts]
        self.write()

    def write(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, to_json(self.content))
        replace_file(self.path.with_suffix(".md"), markdown(self.content))

    def archive(self, logs: Path, limit_bytes: int = TGZ_BYTES) -> list[str]:
        """Replace the archive of the result and `logs`; returns the names of the logs that were
        left out, the largest first, because the archive would exceed `limit_bytes`."""
        target = self.path.with_suffix(".tgz")
        new = target.with_suffix(".tgz.new")
        files = sorted((f for f in logs.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
        left_out: list[str] = []
        while True:
            with tarfile.open(new, "w:gz") as tar:
                for file in (self.path, self.path.with_suffix(".md")):
                    tar.add(file, file.name)
                for file in files:
                    tar.add(file, f"logs/{file.relative_to(logs)}")
            if new.stat().st_size <= limit_bytes or not files:
                os.replace(new, target)
                return left_out
            left_out.append(str(files.pop().relative_to(logs)))


@dataclass
class Stage:
    """Runs parts one after another, each as a process of `command`, within `budget_s` seconds."""

    merged: Merged
    number: int
    logs: Path
    command: Command
    budget_s: float
    commit: str = field(default_factory=commit)
    grace_s: float = _GRACE_S

    def run(self, parts: Mapping[str, float]) -> bool:
        """Run the parts, each with its limit in seconds. Returns whether all of them succeeded and
        all their goals are met."""
        end_s = time.monotonic() + self.budget_s
        for name, limit_s in parts.items():
            left_s = end_s - time.monotonic()
            if left_s < min(_LEAST_S, limit_s):
                self._skip(name, f"not started: the budget of {self.budget_s:g} s is over")
                continue
            self._run(name, min(limit_s, left_s))
        records = [self.merged.content["parts"][name] for name in parts]
        is_met = all(goal["met"] for record in records for goal in record["goals"])
        return is_met and not any(record["failures"] for record in records)

    def _skip(self, name: str, reason: str) -> None:
        print(f"\n== {name}: {reason}", flush=True)
        if name not in self.merged.content["parts"]:
            self.merged.put(
                name, self._record("skipped", 0.0, {}, {}) | {"failures": {name: reason}}
            )

    def _run(self, name: str, limit_s: float) -> None:
        print(f"\n== {name}, at most {limit_s:.0f} s", flush=True)
        result, log = self.logs / f"{name}.json", self.logs / f"{name}.txt"
        result.unlink(missing_ok=True)
        self.merged.put(name, self._record("running", 0.0, {}, {}), is_new=True)
        began_s = time.monotonic()
        with log.open("wb") as file, sampled(self.logs / f"{name}.smi.csv") as read:
            # A group of its own, so that the part's own processes end with it.
            process = subprocess.Popen(
                self.command(name, result, self.merged.path, self.logs),
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": _paths(), "PYTHONUNBUFFERED": "1"},
            )
            try:
                state, n_printed, seen = "running", 0, 0
                while state == "running":
                    state = _state(process, began_s + limit_s)
                    n_printed = _print_from(log, n_printed)
                    stamp = result.stat().st_mtime_ns if result.exists() else 0
                    if state == "running" and stamp != seen:
                        seen = stamp
                        seconds = time.monotonic() - began_s
                        self.merged.put(name, self._record(state, seconds, read(), _read(result)))
            finally:
                _end_group(process, self.grace_s)
            _print_from(log, n_printed)
            seconds = time.monotonic() - began_s
            record = self._record(state, seconds, read(), _read(result))
        if state == "interrupted":
            record["failures"][name] = f"interrupted after {limit_s:.0f} s"
        elif process.returncode and not record["failures"]:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            record["failures"][name] = f"exit code {process.returncode}: {' '.join(last)}"
        if process.returncode and state == "done":
            record["state"] = "failed"
        self.merged.put(name, record)
        for large in self.merged.archive(self.logs):
            print(f"   {large} is too large for the archive", flush=True)
        for failed, reason in record["failures"].items():
            print(f"   FAILED {failed}: {reason}", flush=True)
        print(f"   {seconds:.1f} s", flush=True)

    def _record(
        self, state: str, seconds: float, known: Mapping[str, Any], part: Mapping[str, Any]
    ) -> dict[str, Any]:
        content = {"versions": {}, "figures": {}, "goals": [], "failures": {}} | dict(part)
        ceilings = combined(self.merged.content, "figures").get(CEILINGS)
        return {
            "stage": self.number,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self.commit,
            "state": state,
            "seconds": seconds,
            "readings": dict(known),
            "relative_to": ceilings,
            **content,
        }


def _paths() -> str:
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(path for path in paths if path)


def _state(process: subprocess.Popen[bytes], end_s: float) -> str:
    """Waits for up to a second; `done` after the exit, `interrupted` at the time `end_s`."""
    try:
        process.wait(max(0.01, min(_POLL_S, end_s - time.monotonic())))
    except subprocess.TimeoutExpired:
        return "interrupted" if time.monotonic() >= end_s else "running"
    return "done"


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a part and all its processes: first politely, so that it can stop a server."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            _signal_group(process.pid, number)
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
    _signal_group(process.pid, signal.SIGKILL)  # processes that it left behind


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # the group is empty


def _read(result: Path) -> dict[str, Any]:
    if not result.exists():
        return {}
    content: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return content


def _print_from(log: Path, begin: int) -> int:
    """Print the log from byte `begin` on; returns its present end."""
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read()
    sys.stdout.write(text.decode(errors="replace"))
    sys.stdout.flush()
    return begin + len(text)
