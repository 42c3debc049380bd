"""The directory of a search.

<out>/capacity.json  capacity.csv  report.html   the answer, and the probes that it rests on
<out>/probes/NN/                                 the run directory of each probe
<out>/servers/                                   the logs of a server of ours
"""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadgen.capacity.capacity_spec import CapacitySpec
from loadgen.cells.cell import differing
from loadgen.errors import UsageError
from loadgen.measure.capacity.capacity_probe import Probe
from loadgen.measure.capacity.capacity_result import Capacity, conclude, probe_json, read_probe
from loadgen.measure.capacity.next_probe import Question, judge
from loadgen.run.directory import free
from loadgen.run.manifest import version
from loadgen.workload.scenario import Scenario

SCHEMA = 1


def default_directory(scenario: Scenario) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return free(Path("runs") / f"capacity-{scenario.name}-{stamp}")


def definition(asked: CapacitySpec, question: Question) -> dict[str, Any]:
    """What must be the same for a search to go on; time and precision may change."""
    return {
        "scenario": asked.scenario.resolved(),
        "target": asked.target,
        "engine": asked.options.engine,
        "model": asked.options.model,
        "over": asked.over,
        "attainment": question.target,
        "between": None if asked.between is None else list(asked.between),
    }


def kept_probes(
    asked: CapacitySpec, question: Question, directory: Path, resume: bool
) -> list[Probe]:
    """The probes of a search that is to go on; none for a new one. Raises UsageError."""
    path = directory / "capacity.json"
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--out {directory}: is no directory")
    if not any(path.is_file() for path in directory.rglob("*")):
        if resume and not (directory / "probes").is_dir():
            raise UsageError(f"--resume: {directory} holds no search; leave --resume out")
        return []
    if not path.is_file():
        if resume and (directory / "probes").is_dir():
            return []  # interrupted before the first probe was done
        raise UsageError(f"--out {directory}: exists already and holds no capacity search")
    try:
        content = json.loads(path.read_text())
        probes = [read_probe(one) for one in content["probes"]]
        before = content["definition"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read ({error!r}); choose another --out") from None
    if not resume and not probes:
        return []  # its target was never there, or it was interrupted in its first probe
    if not resume:
        raise UsageError(
            f"--out {directory}: holds a search with {len(probes)} probes; add --resume to go on, "
            "or choose another --out"
        )
    wanted = json.loads(json.dumps(definition(asked, question)))
    if lines := differing(wanted, before):
        raise UsageError(
            f"--resume {directory}: it was another search ({'; '.join(lines)}); ask for the same, "
            "or choose another --out"
        )
    return probes


def store(
    asked: CapacitySpec,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    answer: Capacity | None,
) -> None:
    """capacity.json, replaced at once, so that an interrupt never leaves half a file."""
    best = answer or conclude(question, probes, asked.unit)
    content = {
        "schema": SCHEMA,
        "kind": "capacity",
        "command": list(asked.options.command),
        "definition": definition(asked, question),
        "answer": best.to_json(),
        "probes": [probe_json(probe) for probe in probes],
    }
    directory.mkdir(parents=True, exist_ok=True)
    part = directory / "capacity.json.part"
    part.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    part.replace(directory / "capacity.json")


def write(
    asked: CapacitySpec,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    answer: Capacity,
) -> None:
    """The answer, for programs, for spreadsheets and, as a page, for people."""
    from reports.capacity.page import render
    from reports.capacity.view import csv_text
    from reports.page import write_page
    from reports.redaction import redact

    store(asked, question, directory, probes, answer)
    (directory / "capacity.csv").write_text(csv_text(answer), encoding="utf-8")
    about = {
        "scenario": asked.scenario.name,
        "target": redact(asked.target),
        "engine": redact(asked.options.engine),
        "command": shlex.join(redact(word) for word in asked.options.command),
        "slobench": version(),
        "host": platform.node(),
        "promises": ", ".join(_promises(asked.scenario)),
        "text": asked.scenario.to_yaml(),
    }
    page = render(answer, judge(question, probes).posterior, about, asked.options.cache_dir)
    write_page(directory / "report.html", page)


def _promises(scenario: Scenario) -> list[str]:
    texts = [slo.text for slo in scenario.slos() if slo.scope == "request"]
    for name, own in scenario.classes.items():
        texts += [f"{name}: {slo.text}" for slo in own.slos() if slo.scope == "request"]
    return texts
