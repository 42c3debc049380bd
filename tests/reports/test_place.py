"""The commands on a page name the run as a shell and `slobench` find it."""

import re
import shlex
from html import unescape

from loadgen.archive import store
from loadgen.measure.aggregate import summarize
from loadgen.run.conclude import conclude
from reports.run.engine_section import EngineSection, MissReason
from reports.run.page import render, run_word
from tests.runs import measured_run, write_to


def commands(page):
    """Of those that read this run, the word that names it."""
    said = re.findall(r'<code(?: data-command="([^"]*)")?>([^<]*)</code>', page)
    words = [shlex.split(unescape(attribute or text)) for attribute, text in said]
    return {
        " ".join(w[1:3] if w[1] == "simulate" else w[1:2]): w[3 if w[1] == "simulate" else 2]
        for w in words
        if w[:1] == ["slobench"] and w[1] in ("rescore", "export", "simulate")
    }


def test_a_page_names_the_directory_the_run_is_in(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = measured_run(slo=[])
    write_to(tmp_path / "runs" / "it's mine", run)
    (tmp_path / "runs" / "latest").symlink_to("it's mine", target_is_directory=True)
    for given in (tmp_path / "runs" / "it's mine", (tmp_path / "runs" / "latest")):
        conclude(given.relative_to(tmp_path), None, None, cache)
        page = (given / "report.html").read_text()
        assert page.count("slobench rescore &#39;runs/it&#39;&#34;&#39;&#34;&#39;s mine&#39;") == 2
        assert commands(page) == {"rescore": "runs/it's mine"}
        store.read_run(tmp_path / commands(page)["rescore"])


def test_a_page_too_large_for_its_requests_and_one_of_an_engine_name_it_too(
    tmp_path, cache, monkeypatch
):
    monkeypatch.setattr("reports.run.embedded_rows.MOST_BYTES", 0)
    run = measured_run(slo=["ttft <= 1ms"])
    story = EngineSection([], [], {}, misses=[MissReason("policy", 1, [("deadline", 1)])])
    page = render(run, summarize(run), cache, story, tmp_path / "runs" / "x")
    place = str(tmp_path / "runs" / "x")
    assert commands(page) == {"rescore": place, "export": place, "simulate --misses": place}


def test_a_directory_below_this_one_is_named_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_word(tmp_path / "runs" / "x") == "runs/x"
    assert run_word(tmp_path.parent / "x") == str(tmp_path.parent / "x")


def test_a_page_of_no_directory_says_run():
    assert run_word(None) == "RUN"
