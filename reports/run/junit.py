"""JUnit XML: a document of suites of test cases, and that of a run.

Source: the schema that Jenkins' xunit plugin publishes (junit-10.xsd).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal
from xml.etree import ElementTree as ET

from loadgen.measure.slo_result import SloResult
from loadgen.measure.summary import Summary
from loadgen.records import Status
from reports.redaction import redact

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 §2.2
_COUNTS = (("failure", "failures"), ("error", "errors"), ("skipped", "skipped"))


@dataclass(frozen=True, slots=True)
class Case:
    """A test case. `type` is that of a failure or an error, "" for none; `text` is the message, or
    the output of a case that passed, "" for none."""

    name: str
    outcome: Literal["passed", "failure", "error", "skipped"] = "passed"
    text: str = ""
    type: str = ""


@dataclass(frozen=True, slots=True)
class Suite:
    """Test cases of the same class, `name`, with their common output."""

    name: str
    cases: Sequence[Case]
    output: str = ""


def junit_without_run(kind: str, message: str) -> str:
    """The file of a command that ended without a run: an error, or skipped for the kind `none`."""
    outcome: Literal["error", "skipped"] = "skipped" if kind == "none" else "error"
    case = Case("run", outcome, message, "" if kind == "none" else kind)
    return junit_xml("slobench run", [Suite("slobench run", [case])])


def junit_xml(name: str, suites: Iterable[Suite]) -> str:
    """The document. Characters that XML cannot hold are replaced."""
    root = ET.Element("testsuites", name=name)
    for suite in suites:
        node = ET.SubElement(root, "testsuite", name=_clean(suite.name))
        node.set("tests", str(len(suite.cases)))
        for outcome, key in _COUNTS:
            node.set(key, str(sum(case.outcome == outcome for case in suite.cases)))
        for case in suite.cases:
            _add(node, suite.name, case)
        if suite.output:
            ET.SubElement(node, "system-out").text = _clean(suite.output)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def junit_of_run(summary: Summary) -> str:
    """A case per SLO, and a case for the validity of the run. A missed SLO is a failure. A run that
    cannot be trusted is an error, and a run without an SLO or with too few requests is skipped.
    SLOs of single requests count together, in attainment."""
    reasons, is_trusted = redact("; ".join(summary.reasons)), summary.validity.trusted
    if not is_trusted:
        run = Case("run", "error", reasons, "invalid")
    elif summary.verdict == "no_verdict":
        run = Case("run", "skipped", reasons)
    else:
        run = Case("run")
    of_classes = [(f"{name}: ", r) for name, own in summary.classes.items() for r in own.slo]
    cases = [
        _slo_case(f"{prefix}{result.text}", result, is_trusted)
        for prefix, result in [("", result) for result in summary.slo] + of_classes
        if result.scope == "run"
    ]
    return junit_xml("slobench run", [Suite(summary.run, [run, *cases], _outcomes(summary))])


def _outcomes(summary: Summary) -> str:
    """The due requests by status: `ok 187, truncated 13`."""
    counts = ((status.name.replace("_", " "), summary.counts[status.name]) for status in Status)
    return ", ".join(f"{name} {n}" for name, n in counts if n)


def _slo_case(name: str, result: SloResult, is_trusted: bool) -> Case:
    text = f"value {result.value:g}, limit {result.limit:g}, n = {result.n}"
    if result.met is None or not is_trusted:
        return Case(name, "skipped", result.note or text)
    return Case(name, text=text) if result.met else Case(name, "failure", text, "missed")


def _add(suite: ET.Element, classname: str, case: Case) -> None:
    node = ET.SubElement(suite, "testcase", classname=_clean(classname), name=_clean(case.name))
    if case.outcome == "passed":
        if case.text:
            ET.SubElement(node, "system-out").text = _clean(case.text)
        return
    kind = {"type": case.type} if case.type else {}
    ET.SubElement(node, case.outcome, kind, message=_clean(case.text))


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)
