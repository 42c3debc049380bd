"""The fault table of docs/reliability.md names tests that exist and that `make faults` runs."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reliability.md").read_text()
HEAD = "| Fault | Outcome | Test |\n|---|---|---|\n"


def rows(section):
    """The rows of a section's table as lists of three cells."""
    text = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines]


def is_faults_marker(node):
    return isinstance(node, ast.Attribute) and node.attr == "faults"


def problem(name):
    """The reason why `file::test` is not run by `make faults`; None if it is."""
    file, _, test = name.partition("::")
    if not (ROOT / file).is_file():
        return f"no file {file}"
    module = ast.parse((ROOT / file).read_text())
    found = [n for n in ast.walk(module) if isinstance(n, ast.FunctionDef) and n.name == test]
    if not found:
        return f"no test {test} in {file}"
    marks = [node.value for node in module.body if isinstance(node, ast.Assign)]
    marks += found[0].decorator_list
    if not any(is_faults_marker(node) for mark in marks for node in ast.walk(mark)):
        return f"{name} lacks the marker faults"
    return None


SECTIONS = ("Evidence", "Answers", "Endings", "Strangers")


def test_each_section_has_a_table():
    for section in SECTIONS:
        start = rf"^## {section}\n\n([A-Z].*\n\n)?{re.escape(HEAD)}"
        assert re.search(start, PAGE, re.MULTILINE), section


def test_each_row_names_tests_that_exist_and_are_marked():
    listed = [row for section in SECTIONS for row in rows(section)]
    assert listed
    broken = [row for row in listed if len(row) != 3 or not all(row)]
    names = [name for row in listed for name in re.findall(r"`(tests/[^`]+)`", row[-1])]
    assert not broken, broken
    assert len(names) >= len(listed)
    assert not [why for name in names if (why := problem(name))]


def test_a_test_that_is_missing_or_not_marked_is_found():
    assert problem("tests/none.py::test_x") == "no file tests/none.py"
    assert "no test" in problem("tests/archive/test_store.py::test_x")
    unmarked = "tests/archive/test_store.py::test_a_directory_that_is_no_run_is_named"
    assert "lacks the marker" in problem(unmarked)
