"""Files of a capacity search.

<out>/capacity.json  capacity.csv  report.html   the result and its probes
<out>/probes/NN/                                 the run directory of each probe
<out>/servers/                                   logs of a server that slobench started
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

from loadgen.run.manifest import version
from loadgen.studies.capacity.next_probe import Question, judge
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import (
    Capacity,
    CapacityFile,
    Definition,
    answer_of,
    conclude,
)
from loadgen.studies.capacity.spec import CapacitySpec
from loadgen.studies.study import Place, Study
from loadgen.workload.scenario import Scenario

CAPACITY = Study("capacity", "capacity search", CapacityFile, before=("capacity.json",))


def definition(spec: CapacitySpec, question: Question) -> Definition:
    return Definition(
        scenario=spec.scenario.resolved(),
        target=spec.target,
        engine=spec.options.engine,
        model=spec.options.model,
        over=spec.over,
        attainment=question.target,
        between=None if spec.between is None else list(spec.between),
    )


def store(
    spec: CapacitySpec,
    question: Question,
    place: Place[CapacityFile],
    probes: Sequence[Probe],
    answer: Capacity | None = None,
) -> None:
    """Writes capacity.json."""
    best = answer or conclude(question, probes, spec.unit, counted=spec.counted)
    place.write(
        CapacityFile(
            command=list(spec.options.command),
            definition=definition(spec, question),
            answer=answer_of(best),
            probes=list(probes),
        )
    )


def write(
    spec: CapacitySpec,
    question: Question,
    place: Place[CapacityFile],
    probes: Sequence[Probe],
    answer: Capacity,
) -> None:
    """Writes the result as JSON, as CSV and as a page."""
    from loadgen.studies.capacity.page import render
    from loadgen.studies.capacity.view import csv_text
    from reports.redaction import redact, redacted_command

    store(spec, question, place, probes, answer)
    place.write_text("capacity.csv", csv_text(answer))
    about = {
        "scenario": spec.scenario.name,
        "target": redact(spec.target),
        "engine": redact(spec.options.engine),
        "command": redacted_command(spec.options.command),
        "slobench": version(),
        "host": platform.node(),
        "slos": request_slos(spec.scenario),
        "text": spec.scenario.to_yaml(),
    }
    page = render(answer, judge(question, probes).posterior, about, spec.options.cache_dir)
    place.write_text("report.html", page)


def request_slos(scenario: Scenario) -> str:
    """The limits per request, or per tree of agents, `ttft <= 500ms, tpot <= 50ms`."""
    texts = [slo.text for slo in scenario.slos() if slo.scope != "run"]
    for name, own in scenario.classes.items():
        texts += [f"{name}: {slo.text}" for slo in own.slos() if slo.scope != "run"]
    return ", ".join(texts)
