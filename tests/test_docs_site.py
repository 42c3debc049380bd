"""The docs site builds without a warning, and its generated pages name every verb and name."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import slobench
from loadgen.cli.lazy_verbs import VERBS
from tests.browser import chromium, needs_chromium

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_command_line_page_has_every_verb_and_its_flags(site):
    text = (site / "cli.html").read_text()
    missing = [v for v in VERBS if f'id="slobench-{v}"' not in text]
    assert missing == []
    assert "e.g. 'p99(ttft)<=500ms', or a preset" in html.unescape(text)
    for flag in ("--input-len", "--budget", "--metrics-port"):
        assert f"<code>{flag}</code>" in text


def test_the_python_page_has_every_name_with_its_docstring(site):
    text = (site / "reference.html").read_text()
    missing = [name for name in slobench.__all__ if f"sb.{name}" not in text]
    assert missing == []
    assert "Runs a scenario" in text
    assert "RunOptions" in text


def test_llms_txt_lists_every_page_with_its_first_sentence(site):
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# slobench"
    links = {match[1]: match[2] for line in lines
             if (match := re.fullmatch(r"- \[[^]]+\]\(([\w-]+\.html)\): (.+)", line))}  # fmt: skip
    pages = {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}
    assert pages - {"README.html"} <= set(links)


def test_a_page_needs_no_other_host(site):
    for name in ("index.html", "tutorial.html"):
        text = (site / name).read_text()
        assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:css|js|woff2?)', text)


def test_the_home_page_begins_with_the_question_and_a_command(site):
    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "index.html").read_text()))
    head = text[text.index("How much traffic can this LLM server take") :]
    assert head.index("slobench capacity --target") < head.index("Find your question")


@pytest.mark.e2e
@needs_chromium
def test_opened_from_a_folder_the_site_shows_no_search_that_cannot_work(site):
    with chromium() as browser:
        page = browser.new_page()
        page.goto((site / "tutorial.html").as_uri())
        assert page.locator(".md-search").count() == 0
        assert page.get_by_role("heading", name="Ten-minute tutorial").is_visible()
