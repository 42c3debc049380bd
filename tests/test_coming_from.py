"""Every command, flag, arrival kind and column that the coming-from pages name exists, and both
sides of a pair ask for the same traffic."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.cli.kinds import FAMILIES, describe
from loadgen.errors import UsageError
from loadgen.measure.catalog import METRICS
from loadgen.records import REQUESTS
from loadgen.translate.command_line import translate
from loadgen.yaml_document import parse_document

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("coming-from-*.md"))
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # it is a group


def blocks(kind):
    return [
        pytest.param(page, text.strip(), id=f"{page.stem}-{n}")
        for page in PAGES
        for n, text in enumerate(re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL))
    ]


def scenario_of(line):
    """What `slobench run …` would send, as the document it prints."""
    words = shlex.split(line)
    assert words[:2] == ["slobench", "run"]
    found = CliRunner().invoke(app, [*words[1:], "--print-scenario"])
    assert found.exit_code == 0, found.output
    return parse_document(found.stdout, line, UsageError).values


def test_there_is_a_page_for_each_of_the_four():
    names = [page.stem.removeprefix("coming-from-") for page in PAGES]
    assert names == ["guidellm", "k6", "locust", "vllm-bench"]


@pytest.mark.parametrize(("page", "line"), blocks("ours"))
def test_every_command_of_ours_runs_as_far_as_its_scenario(page, line):
    assert scenario_of(line)["phases"]["measure"] == "1m"


@pytest.mark.parametrize(("page", "line"), blocks("theirs"))
def test_every_command_of_theirs_translates_without_loss_to_the_one_below_it(page, line):
    text = page.read_text()
    after = text[text.index(line) :]
    ours = re.search(r"```ours\n(.*?)```", after, re.DOTALL)
    assert ours
    theirs = translate(line)
    assert not theirs.missing
    translated = parse_document(theirs.scenario_yaml, line, UsageError).values
    asked = scenario_of(ours[1].strip())
    for key in ("arrivals", "requests", "phases"):
        assert translated[key] == asked[key], key
    assert ("slo" in translated) == ("slo" in asked)
    if "slo" in asked:
        assert translated["slo"] == asked["slo"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_verb_and_flag_of_ours_exists(page):
    text = page.read_text()
    for verb, rest in re.findall(r"slobench ([a-z]+)([^`\n]*)", text):
        assert verb in COMMANDS, verb
        known = {flag for param in COMMANDS[verb].params for flag in param.opts}
        for flag in re.findall(r"(?<!\w)--[a-z-]+", rest):
            assert flag in known, f"slobench {verb} {flag}"
    known = {flag for verb in COMMANDS.values() for param in verb.params for flag in param.opts}
    for row in right_cells(text):
        for flag in re.findall(r"`(--[a-z-]+)", row):
            assert flag in known, flag


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_kind_and_column_of_ours_exists(page):
    text = page.read_text()
    kinds = {entry["kind"] for family in FAMILIES for entry in describe(family)}
    assert set(re.findall(r"\{kind: (\w+)", text)) <= kinds
    columns = {*METRICS, *(REQUESTS.names or ())}
    for row in right_cells(text):
        named = set(re.findall(r"`(\w+_s)`", row))
        assert named <= columns, named


def right_cells(text):
    """The second column of every table: what is said of ours."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [row[2] for row in rows if len(row) > 3 and "---" not in row[1]]
