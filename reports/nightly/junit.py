"""A night as JUnit XML, which every CI system shows: a suite per cell, a case per measure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from loadgen.measure.comparison.judgement import ComparedMeasure
from loadgen.measure.nights.night_verdict import CellVerdict
from reports.nightly.view import HEAD, cell_line, changed_lines, control_lines, row

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0 §2.2


def junit(cells: Sequence[CellVerdict]) -> str:
    """Worse is a failure, an invalid cell an error; inconclusive, and a baseline just made, are
    skipped: nothing was found out.

    Source: the schema that Jenkins' xunit plugin publishes (junit-10.xsd).
    """
    root = ET.Element("testsuites", name="slobench nightly")
    for one in cells:
        suite = ET.SubElement(root, "testsuite", name=_clean(one.cell))
        gated = [measured for measured in one.measures if measured.is_gated]
        for measured in gated:
            _case(suite, one, measured)
        if not gated:
            _case_without_measures(suite, one)
        told = [*control_lines(one), *changed_lines(one), *one.notes]
        said = "\n".join([cell_line(one), *told])
        ET.SubElement(suite, "system-out").text = _clean(said)
        cases = suite.findall("testcase")
        suite.set("tests", str(len(cases)))
        for word in ("failure", "error", "skipped"):
            n = sum(case.find(word) is not None for case in cases)
            suite.set({"failure": "failures", "error": "errors"}.get(word, word), str(n))
    ET.indent(root)
    text = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _case(suite: ET.Element, one: CellVerdict, measured: ComparedMeasure) -> None:
    case = ET.SubElement(suite, "testcase", classname=_clean(one.cell), name=measured.measure)
    told = ", ".join(
        f"{name} {text}" for name, text in zip(HEAD[1:], row(measured)[1:], strict=True)
    )
    if measured.verdict == "worse":
        ET.SubElement(case, "failure", type="worse", message=_clean(told))
    elif measured.verdict == "inconclusive":
        ET.SubElement(case, "skipped", message=_clean(told))
    else:
        ET.SubElement(case, "system-out").text = _clean(told)


def _case_without_measures(suite: ET.Element, one: CellVerdict) -> None:
    case = ET.SubElement(suite, "testcase", classname=_clean(one.cell), name="comparison")
    is_invalid = one.verdict == "invalid"
    message = _clean(" ".join([cell_line(one), *one.notes]))
    ET.SubElement(case, "error" if is_invalid else "skipped", message=message)


def _clean(text: str) -> str:
    return _UNPRINTABLE.sub("\ufffd", text)
