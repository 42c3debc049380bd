"""The page of a run in a real browser: whole, reachable, and right when asked again."""

import json
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]  # has no types

from loadgen.measure.aggregate import summarize
from reports.run.engine_section import EngineSection
from reports.run.page import render
from tests.browser import Watched, chromium, needs_chromium
from tests.runs import measured_run, starved, two_classes

pytestmark = [pytest.mark.e2e, needs_chromium]
SLO = ["ttft <= 150ms", "attainment >= 95%", "p99(ttft) <= 300ms", "p99(itl) <= 20ms"]
OTHERS = ["ttft <= 97.5ms", "tpot <= 10ms"]


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def run():
    return two_classes(slo=SLO, rag=["p50(e2e) <= 5s"], n_failed=5)


@pytest.fixture(scope="module")
def path(run, cache, tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(run, summarize(run), cache, directory=Path("runs/chat-1")))
    return path


def box_of(locator):
    box = locator.bounding_box()
    assert box is not None, "the element is not visible"
    return box


def violations(page):
    found = Axe().run(page).response["violations"]
    return [(v["id"], [n["target"] for n in v["nodes"]]) for v in found]


def test_the_page_is_whole_quiet_and_accessible(browser, run, path):
    watched = Watched(browser, offline=True)
    page = watched.open(path)
    page.wait_for_selector("html[data-drawn][data-rescored]")
    charts = page.locator(".chart")
    names = set(json.loads(str(page.locator("#figures").text_content())))
    assert {charts.nth(k).get_attribute("id") for k in range(charts.count())} == names
    for name in names:
        assert page.locator(f"#{name} svg .mark-group path, #{name} svg .mark-symbol path").count()
    assert page.get_by_text("could not be drawn").count() == 0
    assert violations(page) == []
    page.emulate_media(color_scheme="dark")
    assert violations(page) == []
    assert watched.complaints == []
    assert watched.requests == [path.as_uri()]
    watched.close()


def test_other_promises_are_judged_in_the_page_as_by_rescore(browser, run, path, tmp_path):
    watched = Watched(browser, viewport={"width": 390, "height": 800}, accept_downloads=True)
    page = watched.open(path)
    page.wait_for_selector("html[data-rescored]")
    assert page.evaluate("document.documentElement.scrollWidth") == 390

    def shown():
        cells = page.locator("#rescoring tbody tr:first-child [data-value]").all()
        return [float(str(cell.get_attribute("data-value"))) for cell in cells]

    def judged(slo):
        found = summarize(run, slo=slo)
        whole = found.attainment
        return [whole.met, whole.due, whole.value, found.goodput.requests_per_s.value]

    assert shown() == judged(["ttft <= 150ms"])
    for metric, limit in (("ttft_s", "97.5"), ("tpot_s", "10")):
        page.locator(f'[data-metric="{metric}"] input[type=number]').fill(limit)
    assert shown() == judged(OTHERS)
    for metric in ("ttft_s", "tpot_s"):
        page.locator(f'[data-metric="{metric}"] input[type=checkbox]').uncheck()
    cells = page.locator("#rescoring tbody tr:first-child td").all_text_contents()
    assert cells[2:4] == ["n/a: no per-request limit", "–"]
    for metric in ("ttft_s", "tpot_s"):
        page.locator(f'[data-metric="{metric}"] input[type=checkbox]').check()
    command = page.locator("[data-command]").text_content()
    assert command == "slobench rescore runs/chat-1 --slo 'ttft <= 97.5ms' --slo 'tpot <= 10ms'"
    slider = page.get_by_label("E2E limit")
    slider.focus()
    page.keyboard.press("Home")
    assert shown()[0] == 0  # half of the quickest: nobody keeps it
    page.keyboard.press("End")
    assert shown() == judged(OTHERS)
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").press("Enter")
    saved.value.save_as(tmp_path / "rows.csv")
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(lines) == 1 + shown()[1]
    assert sum(line.endswith(",true") for line in lines) == shown()[0]
    assert watched.complaints == []
    watched.close()


def test_a_share_near_100_percent_is_the_same_in_the_tile_and_in_the_recalculation(
    browser, cache, tmp_path
):
    run = measured_run(2220, n_tokens=2, slo=["ttft <= 1s"], n_failed=1)
    path = tmp_path / "report.html"
    path.write_text(render(run, summarize(run), cache))
    watched = Watched(browser)
    page = watched.open(path)
    page.wait_for_selector("html[data-rescored]")
    tile = page.locator('.tile [data-path="attainment.value"] .value').text_content()
    assert tile == "99.95 %"
    assert page.locator("#rescoring tbody tr:first-child td").nth(2).text_content() == tile
    watched.close()


def test_the_clock_is_switched_from_the_keyboard(browser, path):
    watched = Watched(browser)
    page = watched.open(path)
    page.wait_for_selector("html[data-drawn]")

    def curve(name):
        return page.locator(f"#{name} .mark-line path").first.get_attribute("d")

    before = {name: curve(name) for name in ("spectrum-ttft", "spectrum-tpot")}
    page.get_by_role("radio", name="the scheduled send time").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "before => document.querySelector('#spectrum-ttft .mark-line path').getAttribute('d')"
        " !== before",
        arg=before["spectrum-ttft"],
    )
    assert curve("spectrum-tpot") == before["spectrum-tpot"]  # it has one clock only
    watched.close()


def test_a_stretch_brushed_in_any_strip_is_shown_by_all(browser, path):
    watched = Watched(browser, viewport={"width": 1000, "height": 1200})
    page = watched.open(path)
    page.wait_for_selector("html[data-drawn]")
    strips = page.locator("#timeline svg .mark-group.role-scope")
    assert strips.count() == 6

    def axes():
        return page.evaluate(
            """() => [...document.querySelectorAll('#timeline svg .role-axis')]
            .map(axis => axis.getAttribute('aria-label'))
            .filter(label => /^X-axis/.test(label || ''))"""
        )

    whole = axes()
    strips.nth(3).scroll_into_view_if_needed()
    box = strips.nth(3).locator("path.background").first.bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.4 * box["width"], middle, steps=4)
    page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=4)
    page.mouse.up()
    inputs = page.locator("[data-zoom] input")
    page.wait_for_function("() => document.querySelector('[data-zoom] input').value !== '0'")
    shown = [float(inputs.nth(k).input_value()) for k in (0, 1)]
    end_s = float(str(page.locator("[data-zoom]").get_attribute("data-zoom")))
    assert shown == pytest.approx([0.25 * end_s, 0.5 * end_s], abs=0.02 * end_s)
    zoomed = axes()
    assert zoomed[0] == whole[0]  # the first strip keeps the whole run
    assert not set(whole[1:]) & set(zoomed[1:])
    page.get_by_role("button", name="the whole run").press("Enter")
    page.wait_for_function("() => document.querySelector('[data-zoom] input').value === '0'")
    assert axes() == whole
    inputs.nth(1).fill("5")  # from the keyboard
    inputs.nth(1).press("Enter")
    page.wait_for_function(
        """whole => [...document.querySelectorAll('#timeline svg .role-axis')]
        .map(axis => axis.getAttribute('aria-label'))
        .filter(label => /^X-axis/.test(label || ''))[1] !== whole""",
        arg=whole[1],
    )
    assert watched.complaints == []
    watched.close()


def test_any_request_is_looked_up_with_why_it_waited(browser, cache, tmp_path):
    told = {25: "waited 1.2 s: 1 s behind r-3 (900 prompt tokens, <b>)", 30: "did not wait"}
    story = EngineSection(bins=[], waiting=[], waits_s={}, why=told)
    run = measured_run(40, n_tokens=5, slo=["ttft <= 1s"])
    run.request_rows["first_token_s"][25] = run.request_rows["released_s"][25] + 0.125
    path = tmp_path / "report.html"
    path.write_text(render(run, summarize(run), cache, story))
    watched = Watched(browser)
    page = watched.open(path)
    page.wait_for_selector("html[data-lookup]")
    answer = page.locator("#lookup output")

    def look(number):
        page.locator("#lookup input").fill(str(number))
        page.locator("#lookup input").press("Enter")
        return answer.text_content()

    assert look(25) == f"Request 25 {told[25]}."
    rows = page.locator("#lookup tbody tr").all_text_contents()
    assert "TTFT125 ms" in rows
    assert "statusok" in rows
    assert look(30) == "Request 30 did not wait."
    assert look(31) == "The engine's log has no entry for this request."
    assert look(5) == "No due request has the number 5."  # warm-up
    assert page.locator("#lookup tbody tr").count() == 0
    assert watched.complaints == []
    watched.close()


@pytest.mark.parametrize(
    ("kind", "confidence", "words"),
    [
        (measured_run(slo=["ttft <= 1s"]), None, "MET"),
        (measured_run(slo=["p50(ttft) <= 10ms"]), None, "MISSED with 95 % confidence"),
        (starved(measured_run(slo=SLO)), None, "INVALID: NO VERDICT"),
        (measured_run(slo=["p99(ttft) <= 300ms"]), 0.95, "INCONCLUSIVE too few requests"),
    ],
    ids=["met", "missed", "invalid", "inconclusive"],
)
def test_the_verdict_is_the_first_thing_seen(browser, cache, tmp_path, kind, confidence, words):
    path = tmp_path / "report.html"
    path.write_text(render(kind, summarize(kind, confidence=confidence), cache))
    watched = Watched(browser, viewport={"width": 390, "height": 600}, java_script_enabled=False)
    page = watched.open(path)
    heading = page.locator("#verdict")
    assert words in heading.inner_text().replace("\n", " ")
    box = heading.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] < 600
    watched.close()


def test_sections_are_folded_by_relevance_and_open_from_the_contents(browser, cache, tmp_path):
    run = measured_run(40, n_tokens=5, slo=["ttft <= 1s"])
    path = tmp_path / "report.html"
    path.write_text(render(run, summarize(run), cache))
    watched = Watched(browser, viewport={"width": 390, "height": 800})
    page = watched.open(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate("document.documentElement.scrollHeight") < 6000
    contents = page.get_by_role("navigation", name="Contents")
    contents.get_by_text("Contents").press("Enter")
    assert contents.get_by_role("link").first.text_content() == "Result"
    spectrum = page.locator("#spectrum-ttft")
    assert not spectrum.is_visible()
    contents.get_by_role("link", name="Every percentile").press("Enter")
    page.wait_for_selector("#spectrum-ttft svg .mark-line path")
    assert box_of(page.locator("#spectrum-ttft svg.marks"))["width"] > 200
    assert box_of(contents)["y"] == 0  # it stays
    assert box_of(contents)["height"] < 60  # and is folded again
    assert not page.locator("#why-itl").is_visible()
    contents.get_by_role("button", name="Open all").press("Enter")
    page.wait_for_selector("#why-itl svg .mark-line path")
    assert page.locator("details.fold:not([open])").count() == 0
    assert watched.complaints == []
    watched.close()


def test_an_invalid_run_opens_the_validity_checks(browser, cache, tmp_path):
    run = starved(measured_run(40, n_tokens=5, slo=["ttft <= 1s"]))
    path = tmp_path / "report.html"
    path.write_text(render(run, summarize(run), cache))
    watched = Watched(browser)
    page = watched.open(path.as_uri())
    page.wait_for_selector("html[data-drawn]")
    assert page.get_by_text("client CPU", exact=True).first.is_visible()
    assert not page.get_by_text("Preflight checks").is_visible()
    watched.close()


def test_the_verdict_of_each_slo_is_visible_on_a_phone(browser, path):
    watched = Watched(browser, viewport={"width": 390, "height": 800})
    page = watched.open(path)
    page.wait_for_selector("html[data-drawn]")
    table = page.locator("[aria-labelledby=slos] table")
    cell = table.locator("tbody td:nth-child(5)").first
    assert table.locator("th:nth-child(5)").first.text_content() == "verdict"
    box, frame = box_of(cell), box_of(page.locator(".scroll[aria-labelledby=slos]"))
    assert box["x"] + box["width"] <= frame["x"] + frame["width"] + 1
    watched.close()
