"""The display of a run at a prompt and in a notebook, and the example notebook."""

import json
from html.parser import HTMLParser
from pathlib import Path

import nbclient
import nbformat
import pytest

import slobench as sb

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "example.ipynb"
SETTINGS = ["arrivals.rate=6/s", "phases.measure=20s"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notebook") / "a <b> run"
    scenario = sb.load_scenario("quickstart", [*SETTINGS, "slo=[p99(ttft) <= 5s, ttft <= 1us]"])
    sb.simulate(scenario, out_dir=folder, mode="chunked", shape="tiny", hardware="cpu")
    return folder


class Tags(HTMLParser):
    """Checks that tags are balanced, and collects texts and links."""

    def __init__(self, html):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.links: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.links += [value for name, value in attrs if name == "href"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_a_run_shows_its_verdict_slos_latencies_and_page(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    run = sb.read_run("a <b> run")
    lines = repr(run).splitlines()
    assert lines[0] == "Run a <b> run: MISSED (with 95 % confidence)"
    assert lines[1].startswith("  0 of ")
    assert lines[2].startswith("  TTFT: p50 ")
    assert lines[-1] == "  page: a <b> run/report.html"
    shown = Tags(run._repr_html_())
    assert {"MISSED", "p99(ttft) <= 5s", "TTFT", "TPOT", "E2E"} <= set(shown.texts)
    assert shown.links == ["a%20%3Cb%3E%20run/report.html"]
    assert any("run a <b> run" in text for text in shown.texts)


def test_a_simulated_run_without_a_directory_has_no_link():
    run = sb.simulate(sb.load_scenario("quickstart", SETTINGS), shape="tiny", hardware="cpu")
    assert Tags(run._repr_html_()).links == []
    assert "page:" not in repr(run)
    assert run.requests.shape[0] == len(run.request_rows)


def outputs_of(notebook):
    """Per code cell, the kinds of its outputs, and whether each result has HTML."""
    return [
        [(output.output_type, "text/html" in output.get("data", {})) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


@pytest.mark.e2e
def test_the_example_notebook_runs_and_shows_what_it_did(tmp_path):
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    fresh = nbformat.read(NOTEBOOK, as_version=4)
    for cell in fresh.cells:
        cell.pop("outputs", None) if cell.cell_type != "code" else cell.update(outputs=[])
    nbclient.NotebookClient(
        fresh, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert outputs_of(fresh) == outputs_of(stored)
    assert ("execute_result", True) in outputs_of(stored)[0]
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
    assert "/tmp" not in json.dumps(stored)
