"""Files of a capacity search.

<out>/capacity.json  capacity.csv  report.html   the result and its probes
<out>/probes/NN/                                 the run directory of each probe
<out>/servers/                                   logs of a server that slobench started
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from loadgen.archive.directory import reserved
from loadgen.archive.directory_lock import NAME
from loadgen.errors import UsageError
from loadgen.run.manifest import version
from loadgen.studies.capacity.next_probe import Question, judge
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import Capacity, conclude, probe_json, read_probe
from loadgen.studies.capacity.spec import CapacitySpec
from loadgen.studies.cells.cell import differing
from loadgen.whole_file import read_result, replacing
from loadgen.workload.scenario import Scenario

SCHEMA = 1


def default_directory(scenario: Scenario) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    return reserved(Path("runs") / f"capacity-{scenario.name}-{stamp}")


def definition(spec: CapacitySpec, question: Question) -> dict[str, Any]:
    """The part of a search that --resume must not change; budget and precision may change."""
    return {
        "scenario": spec.scenario.resolved(),
        "target": spec.target,
        "engine": spec.options.engine,
        "model": spec.options.model,
        "over": spec.over,
        "attainment": question.target,
        "between": None if spec.between is None else list(spec.between),
    }


def earlier_probes(
    spec: CapacitySpec, question: Question, directory: Path, resume: bool
) -> list[Probe]:
    """The probes of the search to resume; empty for a new search. Raises UsageError for a directory
    that cannot be used."""
    path = directory / "capacity.json"
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--out {directory}: is not a directory")
    if not any(path.is_file() and path.name != NAME for path in directory.rglob("*")):
        if resume and not (directory / "probes").is_dir():
            raise UsageError(f"--resume: {directory} holds no search; leave out --resume")
        return []
    if not path.is_file():
        if resume and (directory / "probes").is_dir():
            return []  # interrupted before the first probe was done
        raise UsageError(f"--out {directory}: exists already and holds no capacity search")
    try:
        content = json.loads(read_result(path))
        probes = [read_probe(probe) for probe in content["probes"]]
        earlier = content["definition"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: cannot be read ({error!r}); choose another --out") from None
    if not resume and not probes:
        return []  # its target never answered, or it was interrupted in its first probe
    if not resume:
        raise UsageError(
            f"--out {directory}: holds a search with {len(probes)} probes; add --resume to "
            "continue it, or choose another --out"
        )
    current = json.loads(json.dumps(definition(spec, question)))
    if lines := differing(current, earlier):
        raise UsageError(
            f"--resume {directory}: the search there has other settings ({'; '.join(lines)}); "
            "repeat those, or choose another --out"
        )
    return probes


def store(
    spec: CapacitySpec,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    answer: Capacity | None,
) -> None:
    """Write capacity.json by renaming, so that an interrupt never leaves half a file."""
    best = answer or conclude(question, probes, spec.unit)
    content = {
        "schema": SCHEMA,
        "kind": "capacity",
        "command": list(spec.options.command),
        "definition": definition(spec, question),
        "answer": best.to_json(),
        "probes": [probe_json(probe) for probe in probes],
    }
    directory.mkdir(parents=True, exist_ok=True)
    with replacing(directory / "capacity.json") as partial:
        partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write(
    spec: CapacitySpec,
    question: Question,
    directory: Path,
    probes: Sequence[Probe],
    answer: Capacity,
) -> None:
    """Write the result as JSON, as CSV and as a page."""
    from loadgen.studies.capacity.page import render
    from loadgen.studies.capacity.view import csv_text
    from reports.page import write_page
    from reports.redaction import redact, redacted_command

    store(spec, question, directory, probes, answer)
    (directory / "capacity.csv").write_text(csv_text(answer), encoding="utf-8")
    about = {
        "scenario": spec.scenario.name,
        "target": redact(spec.target),
        "engine": redact(spec.options.engine),
        "command": redacted_command(spec.options.command),
        "slobench": version(),
        "host": platform.node(),
        "slos": ", ".join(_request_slos(spec.scenario)),
        "text": spec.scenario.to_yaml(),
    }
    page = render(answer, judge(question, probes).posterior, about, spec.options.cache_dir)
    write_page(directory / "report.html", page)


def _request_slos(scenario: Scenario) -> list[str]:
    texts = [slo.text for slo in scenario.slos() if slo.scope == "request"]
    for name, own in scenario.classes.items():
        texts += [f"{name}: {slo.text}" for slo in own.slos() if slo.scope == "request"]
    return texts
