"""Explanations on pages: each word has one, and points to a section of the docs."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from loadgen.measure.aggregate import summarize
from loadgen.measure.catalog import METRICS
from loadgen.studies.capacity.view import HEAD as PROBE_HEAD
from loadgen.studies.compare.view import HEAD as COMPARE_HEAD
from loadgen.studies.modes.capacity_view import HEAD as MODE_HEAD
from loadgen.studies.nightly.view import HEAD as NIGHT_HEAD
from loadgen.studies.sweep.view import COLUMNS as SWEEP_COLUMNS
from reports.glossary import WORDS, Terms, explained
from reports.run.page import render
from reports.run.tables import METRIC_HEAD, class_table, tiles
from reports.run.verdict_section import slo_head
from tests.browser import Watched, chromium, needs_chromium
from tests.runs import two_classes

DOCS = Path(__file__).parents[2] / "docs"
PLAIN = {"metric", "mean", "max", "measure", "A", "B", "before", "tonight"}
SLO = ["ttft <= 150ms", "attainment >= 95%", "p99(itl) <= 20ms"]


class Page(HTMLParser):
    """The targets of the help buttons, and the ids of the explanations with their texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.words: dict[str, str] = {}
        self._word = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if found.get("class") == "help":
            self.targets.append(found["popovertarget"])
        if found.get("class") == "word":
            self._word = found["id"]
            self.words[self._word] = ""

    def handle_endtag(self, tag):
        self._word = "" if tag == "div" else self._word

    def handle_data(self, data):
        if self._word:
            self.words[self._word] += data


@pytest.fixture
def run():
    return two_classes(slo=SLO, rag=["p50(e2e) <= 5s"], n_failed=5)


def test_every_column_and_tile_is_explained(run):
    summary = summarize(run)
    names = {*slo_head(summary), *class_table(summary)[0], *METRIC_HEAD, *SWEEP_COLUMNS,
             *MODE_HEAD, *PROBE_HEAD, *COMPARE_HEAD, *NIGHT_HEAD,
             *(name for name, _ in tiles(summary))}  # fmt: skip
    assert {name for name in names if explained(name) is None} == PLAIN


@pytest.mark.parametrize(
    ("text", "title"),
    [("p99 TTFT", "TTFT"), ("TTFT p50", "TTFT"), ("p99(tpot)", "TPOT"), ("(ITL p99)", "ITL"),
     ("TTFT from send †", "TTFT from send"), ("Max ITL", "Max ITL"), ("p99.9", "Percentile"),
     ("with 90 % confidence", "Bound"), ("SLO met", "SLO attainment"), ("p (Holm)", "p (Holm)")],
)  # fmt: skip
def test_a_percentile_is_explained_by_its_metric(text, title):
    word = explained(text)
    assert word is not None
    assert word.title == title


def test_a_word_without_an_explanation_is_itself_and_escaped():
    terms = Terms()
    assert terms.term("<b>") == "&lt;b&gt;"
    assert terms.used == {}
    assert "&lt;" not in terms.term("due")
    assert [word.title for word in terms.used.values()] == ["Due"]


def test_each_button_of_a_page_opens_an_explanation_and_each_has_a_button(cache, run):
    page = Page(render(run, summarize(run), cache))
    assert len(page.targets) > 60
    assert set(page.targets) == set(page.words)
    assert METRICS["tpot_s"].meaning in page.words["word-tpot-s"]
    assert "docs/metrics.md#the-metrics" in page.words["word-tpot-s"]


def test_the_docs_have_the_section_of_each_explanation():
    for word in WORDS.values():
        name, _, anchor = word.docs.partition("#")
        heads = re.findall(r"^#+ (.*)$", (DOCS / name).read_text(), re.M)
        slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
        assert anchor in slugs, word.title


@pytest.mark.e2e
@needs_chromium
@pytest.mark.parametrize("width", [390, 1440])
def test_an_explanation_opens_and_closes_by_the_keyboard(cache, run, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(render(run, summarize(run), cache))
    with chromium() as browser:
        watched = Watched(browser, offline=True, viewport={"width": width, "height": 800})
        page = watched.open(path)
        page.wait_for_selector("html[data-drawn]")
        button = page.get_by_role("button", name="What is Goodput?").first
        word = page.locator("#word-goodput")
        assert not word.is_visible()
        button.focus()
        page.keyboard.press("Enter")
        assert word.is_visible()
        box = word.bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert 0 <= box["y"] <= 800 - box["height"]
        page.keyboard.press("Escape")
        assert not word.is_visible()
        assert watched.complaints == []
        watched.close()
