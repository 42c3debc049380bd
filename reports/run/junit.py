"""JUnit XML of a run: a test case per SLO, and a case for the validity of the run.

Source: the schema that Jenkins' xunit plugin publishes (junit-10.xsd).
"""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from loadgen.measure.summary import Summary
from loadgen.records import Status

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 §2.2


def junit_of_run(summary: Summary) -> str:
    """A missed SLO is a failure. A run that cannot be trusted is an error, and a run without an SLO
    or with too few requests is skipped. SLOs of single requests count together, in attainment."""
    root = ET.Element("testsuites", name="slobench run")
    suite = ET.SubElement(root, "testsuite", name=clean(summary.run))
    run = _case(suite, summary, "run")
    reasons = clean("; ".join(summary.reasons))
    if not summary.validity.trusted:
        ET.SubElement(run, "error", type="invalid", message=reasons)
    elif summary.verdict == "no_verdict":
        ET.SubElement(run, "skipped", message=reasons)
    ET.SubElement(run, "system-out").text = clean(_outcomes(summary))
    of_classes = [(f"{name}: ", r) for name, own in summary.classes.items() for r in own.slo]
    for prefix, result in [("", result) for result in summary.slo] + of_classes:
        if result.scope == "request":
            continue
        case = _case(suite, summary, f"{prefix}{result.text}")
        message = clean(f"value {result.value:g}, limit {result.limit:g}, n = {result.n}")
        if result.met is None or not summary.validity.trusted:
            ET.SubElement(case, "skipped", message=clean(result.note) or message)
        elif not result.met:
            ET.SubElement(case, "failure", type="missed", message=message)
        else:
            ET.SubElement(case, "system-out").text = message
    count_cases(suite)
    return document(root)


def _outcomes(summary: Summary) -> str:
    """The due requests by status: `ok 187, truncated 13`."""
    counts = ((status.name.replace("_", " "), summary.counts[status.name]) for status in Status)
    return ", ".join(f"{name} {n}" for name, n in counts if n)


def count_cases(suite: ET.Element) -> None:
    """Set a suite's numbers of test cases by result."""
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for word, key in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(word) is not None for case in cases)))


def document(root: ET.Element) -> str:
    """The text of an XML file."""
    ET.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def clean(text: str) -> str:
    """Text with the characters replaced that XML cannot hold."""
    return _UNPRINTABLE.sub("\ufffd", text)


def _case(suite: ET.Element, summary: Summary, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=clean(summary.run), name=clean(name))
