"""Every command, flag, arrival kind and column that the coming-from pages name exists, and both
sides of a pair ask for the same traffic."""

import re
import shlex
from pathlib import Path

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
    """(page, text) of each code block of a kind; the page names the failing block in a message."""
    return [
        (page, text.strip())
        for page in PAGES
        for text in re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)
    ]


def scenario_of(line):
    """The scenario of a `slobench run …` command, as `--print-scenario` prints it."""
    words = shlex.split(line)
    assert words[:2] == ["slobench", "run"]
    result = CliRunner().invoke(app, [*words[1:], "--print-scenario"])
    assert result.exit_code == 0, result.output
    return parse_document(result.stdout, line, UsageError).values


def test_there_is_a_page_for_each_of_the_four():
    names = [page.stem.removeprefix("coming-from-") for page in PAGES]
    assert names == ["guidellm", "k6", "locust", "vllm-bench"]


def test_every_command_of_ours_runs_as_far_as_its_scenario():
    lines = blocks("ours")
    assert len(lines) >= 7
    for page, line in lines:
        phases = scenario_of(line)["phases"]
        is_counted = "--num-prompts" in line
        assert phases.keys() == {"requests" if is_counted else "measure"}, f"{page.name}: {line}"
        assert is_counted or phases["measure"] == "1m", f"{page.name}: {line}"


def test_every_command_of_theirs_translates_without_loss_to_the_one_below_it():
    lines = blocks("theirs")
    assert len(lines) >= 4
    for page, line in lines:
        text = page.read_text()
        after = text[text.index(line) :]
        ours = re.search(r"```ours\n(.*?)```", after, re.DOTALL)
        assert ours, f"{page.name}: no command of ours below {line}"
        theirs = translate(line)
        assert not theirs.missing, f"{page.name}: {line}"
        translated = parse_document(theirs.scenario_yaml, line, UsageError).values
        expected = scenario_of(ours[1].strip())
        for key in ("arrivals", "requests", "phases", "slo"):
            assert translated.get(key) == expected.get(key), f"{page.name}: {key} of {line}"


def test_every_verb_and_flag_of_ours_exists():
    all_flags = {flag for verb in COMMANDS.values() for param in verb.params for flag in param.opts}
    unknown = []
    for page in PAGES:
        text = page.read_text()
        for verb, rest in re.findall(r"slobench ([a-z]+)([^`\n]*)", text):
            assert verb in COMMANDS, f"{page.name}: slobench {verb}"
            flags = {flag for param in COMMANDS[verb].params for flag in param.opts}
            named = set(re.findall(r"(?<!\w)--[a-z-]+", rest))
            unknown += [f"{page.name}: slobench {verb} {flag}" for flag in named - flags]
        for row in right_cells(text):
            named = set(re.findall(r"`(--[a-z-]+)", row))
            unknown += [f"{page.name}: {flag}" for flag in named - all_flags]
    assert not unknown, "\n".join(unknown)


def test_every_kind_and_column_of_ours_exists():
    kinds = {entry["kind"] for family in FAMILIES for entry in describe(family)}
    columns = {*METRICS, *(REQUESTS.names or ())}
    unknown = []
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"\{kind: (\w+)", text)) - kinds
        for row in right_cells(text):
            named |= set(re.findall(r"`(\w+_s)`", row)) - columns
        unknown += [f"{page.name}: {name}" for name in named]
    assert not unknown, "\n".join(unknown)


def right_cells(text):
    """The second column of every table: the slobench side."""
    rows = [line.split("|") for line in text.splitlines() if line.startswith("|")]
    return [row[2] for row in rows if len(row) > 3 and "---" not in row[1]]
