"""What exists is documented, and what is documented exists."""

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

from loadgen.cli.app import app
from loadgen.cli.kinds import FAMILIES, describe
from loadgen.measure.catalog import METRICS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TEXT = "\n".join(page.read_text() for page in PAGES)
VERBS = sorted(get_command(app).commands)  # type: ignore[attr-defined]  # a group, by its type
KINDS = [(family, entry["kind"]) for family in FAMILIES for entry in describe(family)]


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_shown_in_use(verb):
    assert f"slobench {verb}" in TEXT


@pytest.mark.parametrize(("family", "kind"), KINDS)
def test_each_kind_is_documented(family, kind):
    assert re.search(rf"`{kind}`|^\| {kind} |(kind|format): {kind}", TEXT, re.MULTILINE), (
        f"{family}: {kind}"
    )


@pytest.mark.parametrize("metric", METRICS)
def test_each_metric_is_documented(metric):
    assert f"`{metric}`" in TEXT


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_shows_its_two_commands_first():
    lines = (ROOT / "README.md").read_text().splitlines()[:25]
    assert any("make demo" in line for line in lines)
    assert any("make test" in line for line in lines)
    assert any("MET" in line for line in lines)


def named_checks():
    """The names of the validity checks: the first word given to `ValidityCheck` or its makers."""
    files = (ROOT / "loadgen" / "measure" / "validity").glob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    firsts = [
        c.args[0]
        for c in calls
        if getattr(c.func, "id", "") in ("ValidityCheck", "gate", "share_of_time")
    ]
    return sorted({f.value for f in firsts if isinstance(f, ast.Constant)})


def finding_kinds():
    """The functions that `findings` asks for a sentence: `_not_due` is the kind "not due"."""
    tree = ast.parse((ROOT / "loadgen" / "measure" / "findings.py").read_text())
    (asked,) = (
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "sentences"
    )
    names = [node.func for node in ast.walk(asked) if isinstance(node, ast.Call)]
    return [n.id.strip("_").replace("_", " ") for n in names if isinstance(n, ast.Name)]


def test_the_causes_are_found():
    assert {"record", "lateness", "client CPU", "throttling", "stimulus"} <= set(named_checks())
    assert {"shortened", "not due", "disk writes"} <= set(finding_kinds())


@pytest.mark.parametrize("cause", [*named_checks(), *finding_kinds()])
def test_each_cause_of_an_invalid_run_or_a_note_is_explained(cause):
    page = (ROOT / "docs" / "why-invalid.md").read_text()
    assert f"\n### {cause}\n" in page


def test_every_decision_has_its_number_once():
    numbers = [path.name[:4] for path in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))]
    assert numbers == [f"{n:04d}" for n in range(1, len(numbers) + 1)]
