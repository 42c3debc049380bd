"""Pages that stand beside that of a run: what they show is what their files say, and a browser,
also one for those who hear or type, has nothing to complain of."""

import json
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe  # type: ignore[import-untyped]  # has no types
from msgspec import structs
from rich.console import Console
from rig import nights, queues

import slobench as sb
from loadgen.manifest.json_section import read_section
from loadgen.measure.aggregate import summarize
from loadgen.measure.measures import Measured
from loadgen.studies.capacity import page as capacity_page
from loadgen.studies.capacity.next_probe import Question, judge
from loadgen.studies.capacity.probe import Probe
from loadgen.studies.capacity.result import conclude
from loadgen.studies.capacity.spec import CapacitySpec, question_of
from loadgen.studies.capacity.view import csv_text
from loadgen.studies.compare import page as compare_page
from loadgen.studies.compare.judgement import Options
from loadgen.studies.compare.numbers import judge_sides
from loadgen.studies.demo import page as demo_page
from loadgen.studies.modes import capacity_page as mode_capacity_page
from loadgen.studies.modes import page as modes_page
from loadgen.studies.modes.capacity import compare_capacity
from loadgen.studies.modes.run import ModesSpec, compare
from loadgen.studies.modes.spec import Mode
from loadgen.studies.nightly import page as nightly_page
from loadgen.studies.nightly.result import CellResult, NightResult, NightRun
from loadgen.studies.nightly.values import trend
from loadgen.studies.nightly.verdict import History, judge_night
from loadgen.studies.size import page as size_page
from loadgen.studies.size.demand import Demand, Interval, Variant, costs
from loadgen.studies.size.result import Size, Trial
from loadgen.studies.sweep import page as sweep_page
from loadgen.studies.sweep.result import SweepResult
from loadgen.studies.sweep.view import answer, conclusion
from loadgen.workload.preview import preview
from loadgen.workload.scenario import load_scenario, scenario_from_flags
from loadgen.workload.schedule import make_plan
from reports.preview import page as preview_page
from reports.run import page as run_page
from tests.browser import Watched, chromium, needs_chromium
from tests.runs import measured_run, starved, with_manifest
from tests.shown import number, tables
from tests.studies.demo.made_up import ABSENT, BROKEN, HIGH, OURS, demonstration

KINDS = ("compare", "capacity", "nightly", "modes", "rates", "mode capacities", "sweep",
         "one request", "invalid", "inconclusive", "single runs", "preview", "size",
         "demo")  # fmt: skip
MODES = [Mode("static", {"batch_size": "4"}), Mode("chunked")]


@dataclass(frozen=True)
class Made:
    """A page and the content of the file beside it."""

    text: str
    said: Any


@pytest.fixture(scope="module")
def pages(cache, tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    return {
        "compare": compared(cache),
        "capacity": searched(cache),
        "nightly": night(cache),
        "modes": modes(cache, root / "modes", load_scenario("mixed_classes", ["phases.warmup=0s",
                       "phases.measure=4s"])),
        "rates": modes(cache, root / "rates", scenario_from_flags(rate="4/s", input_len=200,
                       output_len=20, duration="4s", slo=["ttft <= 200ms"]), [2.0, 6.0], 2),
        "mode capacities": mode_capacities(cache, root / "mode capacities"),
        "sweep": swept(cache, root / "sweep"),
        "one request": of_run(cache, measured_run(21, n_tokens=5, slo=["ttft <= 1s"])),
        "invalid": of_run(cache, starved(short_run())),
        "inconclusive": of_run(cache, short_run(["p99(ttft) <= 300ms"]), 0.95),
        "single runs": compared(cache, 1),
        "preview": planned(cache),
        "size": sizing(cache),
        "demo": Made(demo_page.render(demonstration(OURS, HIGH, BROKEN, ABSENT), cache), None),
    }  # fmt: skip


def short_run(slo=("ttft <= 1s",)):
    return measured_run(40, n_tokens=5, slo=slo)


def of_run(cache, run, confidence=None):
    return Made(run_page.render(run, summarize(run, confidence=confidence), cache), None)


def planned(cache):
    scenario = load_scenario("chat_bursty")
    plan = make_plan(scenario)
    facts = preview(scenario, *plan)
    page = preview_page.render(facts, plan.schedule, scenario.names().classes, "", cache)
    return Made(page, None)


def sizing(cache):
    shares = {("round_robin", 3): 0.7, ("round_robin", 4): 0.92, ("power_of_two", 2): 0.5}
    shares["power_of_two", 3] = 0.95
    trials = [Trial(*key, (share,), share >= 0.9) for key, share in shares.items()]
    demand = Demand(10.0, 0.2, 1, 2)
    found = Size(
        demand=demand, capacity=Interval(4.0, 4.2, 4.5, 0.95), target=0.9, router="power_of_two",
        n_divided=3, n_serving=3, n_replicas=4, n_gpus=8, simulated_per_s=12.6,
        trials=tuple(trials), sensitivity=(Variant("headroom 0 %", 4, 8),),
        costs=costs(demand, 8, (1e4, 5e3), 2.0, 700.0), notes=("a note",), exit_code=0,
    )  # fmt: skip
    return Made(size_page.render(found, load_scenario("quickstart"), ["slobench"], cache), None)


def compared(cache, n_runs=3):
    def side(number, itl_s):
        runs = [measured_run(60, seed=10 * number + k, itl_s=itl_s) for k in range(n_runs)]
        return [Measured(with_manifest(run, git=str(number))) for run in runs]

    a, b = side(0, 0.01), side(1, 0.011)
    found = judge_sides(a, b, Options())
    return Made(compare_page.render(found, a, b, Options(), cache), found.to_json())


def searched(cache):
    question = Question(0.9, 0.4, precision=0.1, warmup_s=5, measure_s=20)
    _, probes = queues.search(queues.Queue(), question, np.random.default_rng(4))
    probes = [replace(probe, name=f"{k:02d}") for k, probe in enumerate(probes, 1)]
    lost = Probe(1.5, (9,) * 16, (9,) * 16, 5, 20, 25, "untrusted", "99", "client CPU")
    found = conclude(question, [*probes, lost], "req/s")
    about = dict.fromkeys(("scenario", "target", "engine", "slos", "text", "command",
                           "slobench", "host"), "x")  # fmt: skip
    page = capacity_page.render(found, judge(question, found.probes).posterior, about, cache)
    return Made(page, (found.to_json(), list(map(asdict, found.probes)), csv_text(found)))


def night(cache):
    rng = np.random.default_rng(3)
    before = [nights.cell_night(rng, k, 3) for k in range(4)]
    tonight = nights.cell_night(rng, 4, 3, slower=1.3)
    (found,) = judge_night([tonight], {"chat": History((tuple(before),))}, Options())
    assert found.verdict == "worse"
    known = [replace(one, verdict="same") for one in before] + [replace(tonight, verdict="worse")]
    run = NightRun(name="chat/r1", directory="chat/r1", control_directory=None, reasons=())
    cell = CellResult(
        **structs.asdict(found), factors={}, key="", agrees={}, control=None, runs=(run,),
        trends={m.measure: trend(known, m.measure) for m in found.measures if m.is_gated},
    )  # fmt: skip
    made = NightResult(
        night="20260105T030000.000000Z", started_utc="2026-01-05T03:00:00+00:00", verdict="worse",
        exit_code=1, fail_on="worse", confidence=0.95, window=14, repeats=3, file="nightly.yaml",
        baseline="baseline", directory="night", link="", command=["slobench", "nightly"],
        cells=(cell,),
    )  # fmt: skip
    return Made(nightly_page.render(made, cache), cell.to_json())


def modes(cache, folder, scenario, rates=None, n_seeds=1):
    asked = ModesSpec(scenario, MODES, n_workers=1, rates=rates, n_seeds=n_seeds, cache_dir=cache)
    result = compare(asked, folder, Console(quiet=True)).result
    return Made(modes_page.render(result, cache), result.to_json())


def mode_capacities(cache, folder):
    scenario = scenario_from_flags(
        rate="16/s", input_len=200, output_len=20, num_prompts=120, slo=["ttft <= 200ms"]
    )
    asked = ModesSpec(scenario, MODES, settings={"max_num_seqs": "4"}, n_workers=1, n_seeds=2)
    question = question_of(CapacitySpec(scenario, "sim", attainment=0.9))
    result = compare_capacity(asked, question, folder, Console(quiet=True)).result
    return Made(mode_capacity_page.render(result, cache), result.to_json())


def swept(cache, folder):
    found = sb.sweep(
        load_scenario("quickstart", ["phases.warmup=0s", "phases.measure=3s"]), "sim",
        {"rate": ["4/s", "16/s"]}, folder, repeats=1, engine="shape=8b,hardware=h200",
        cache_dir=cache,
    )  # fmt: skip
    return Made((folder / "report.html").read_text(), found.result.to_json())


def table(page, first, column):
    """The rows of the table whose head begins with `first` and has `column`."""
    return next(
        (head, rows) for head, rows in tables(page) if head[:1] == [first] and column in head
    )


def close(text, value, digits=3):
    shown = number(text)
    if value is None:
        assert shown is None, text
    else:
        assert shown == pytest.approx(value, rel=5.1 * 10**-digits, abs=1e-9), text


def both_ends(text, low, high, scale=0.01):
    ends = text.strip("[]").split(", ")
    for shown, value in zip(ends, (low, high), strict=True):
        assert float(shown.replace("\u202f", "")) * scale == pytest.approx(
            value, rel=0.06, abs=6e-4
        )


def compared_row(cells, said):
    """A row of `compare_view.HEAD`, all of it."""
    name, a, b, change, interval, verdict, p, needs = cells
    assert name.strip("()") == said["measure"].replace("(", "(").strip("()")
    assert name.startswith("(") is not said["is_gated"]
    close(a, said["a"])
    close(b, said["b"])
    close(change, said["change"], 2)
    both_ends(interval, said["low"], said["high"])
    word = {"▲": "better", "=": "same", "▼": "worse"}.get(verdict[0], "inconclusive")
    assert word == said["verdict"]
    if said["p_adjusted"] is None:
        assert p == "–"
    elif p.startswith("<"):
        assert said["p_adjusted"] < 0.001
    else:
        assert float(p) == pytest.approx(said["p_adjusted"], abs=5.1e-4)
    n, _, effect = needs.partition(" for ")
    assert (number(n), number(effect) if effect else None) == (
        said["runs_needed"] and max(said["runs_needed"], 1),
        pytest.approx(said["effect"], rel=0.06) if said["runs_needed"] else None,
    )


def test_a_comparison_shows_what_its_json_says(pages):
    made = pages["compare"]
    _, rows = table(made.text, "measure", "p (Holm)")
    assert len(rows) == len(made.said["measures"]) > 8
    for cells, said in zip(rows, made.said["measures"], strict=True):
        compared_row(cells, said)
    worse = [one for one in made.said["measures"] if one["is_gated"] and one["verdict"] == "worse"]
    assert worse
    for one in worse:  # what broke it stands in the banner
        assert one["measure"] in made.text.partition("</section>")[0]


def test_a_night_shows_what_its_json_says(pages):
    made = pages["nightly"]
    _, rows = table(made.text, "measure", "tonight")
    assert len(rows) == len(made.said["measures"]) == 4
    for cells, said in zip(rows, made.said["measures"], strict=True):
        said = {**said, "runs_needed": said["runs_needed"] and max(2, said["runs_needed"])}
        compared_row(cells, said)
    _, cells = table(made.text, "cell", "nights in baseline")
    assert cells == [["chat", "worse", "4"]]
    _, noise = table(made.text, "measure", "partly assumed")
    for (text, of_runs, of_nights, _), (name, said) in zip(
        noise, made.said["noise"].items(), strict=True
    ):
        assert text == name
        close(of_runs, said["run_sd"], 2)
        close(of_nights, said["night_sd"], 2)


def test_a_search_shows_what_its_json_says(pages):
    made = pages["capacity"]
    answer, probes, csv = made.said
    assert answer["sentence"] in made.text
    missed = min(p["level"] for p in probes
                 if p["grade"] != "untrusted" and sum(p["met"]) < 0.9 * sum(p["due"]))  # fmt: skip
    (first,) = (p["name"] for p in probes if p["level"] == missed)
    assert f"The page of probe {first}, at {missed:.4g} req/s" in made.text
    lines = {line.split(",")[0]: line.split(",") for line in csv.splitlines()[1:]}
    _, rows = table(made.text, "probe", "why")
    by_name = {probe["name"]: probe for probe in probes}
    assert len(rows) == len(probes)
    for name, load, window, due, kept, interval, goodput, result, why in rows:
        said = by_name[name]
        n_due, n_met = sum(said["due"]), sum(said["met"])
        close(load.removesuffix(" req/s"), said["level"], 4)
        assert number(window) == pytest.approx(said["measured_s"], abs=0.51)
        grade = said["grade"]
        if grade == "measured":
            grade = "✓ met" if n_met >= answer["attainment"] * n_due else "✗ missed"
        assert (int(due), result, why) == (n_due, grade, said["why"] or "–")
        assert number(kept) == pytest.approx(n_met / n_due, abs=5.1e-4)
        if said["low"] is None:  # too short for bounds
            assert (interval, lines[name][9:11]) == ("–", ["", ""])
        else:
            both_ends(interval, *(float(lines[name][k]) for k in (9, 10)))
        close(goodput, n_met / said["measured_s"])
        assert f'href="probes/{name}/report.html"' in made.text


def estimate(text, said, is_rate=False):
    """`431 ms ±12`: a value, and half of its interval in the value's unit unless it has its own."""
    shown, _, half = text.partition(" ±")
    close(shown, said["value"])
    if half:
        unit = shown.rpartition(" ")[2] if " " in shown.replace("\u202f", "") else ""
        own = half if half.rpartition(" ")[1] or is_rate else f"{half} {unit}"
        assert number(own) == pytest.approx((said["high"] - said["low"]) / 2, rel=6e-3, abs=1e-9)


@pytest.mark.parametrize("kind", ["modes", "rates"])
def test_modes_show_what_their_json_says(pages, kind):
    made = pages[kind]
    keys = {"TTFT p50": "ttft_p50", "TTFT p99": "ttft_p99", "TPOT p50": "tpot_p50",
            "TPOT p99": "tpot_p99", "ITL p50": "itl_p50", "ITL p99": "itl_p99",
            "goodput": "goodput", "SLO met": "attainment",
            "tokens/s": "output_tokens_per_s"}  # fmt: skip
    head, rows = table(made.text, "mode", "tokens/s")
    assert len(rows) == len(made.said["rows"])
    for cells, said in zip(rows, made.said["rows"], strict=True):
        for title, cell in zip(head, cells, strict=True):
            if title == "mode":
                assert cell == said["mode"]
            elif title == "offered":
                close(cell, said["rate_per_s"])
            elif title == "class":
                assert cell == (said["class"] or "all")
            else:
                estimate(cell, said[keys[title]], title in ("goodput", "tokens/s"))
    others = [row for row in made.said["rows"] if row["mode"] != made.said["baseline"]]
    head, rows = [t for t in tables(made.text) if "TPOT p50" in t[0]][1]
    for cells, said in zip(rows, others, strict=True):
        for title, cell in zip(head, cells, strict=True):
            if title in keys:
                found = said["ratio"][keys[title]]
                shown = [float(part) for part in cell.strip(")").replace(" (", " to ").split(" to ")
                         if part != "–"]  # fmt: skip
                ends = [found["value"], found["low"], found["high"]][: len(shown)]
                assert shown == pytest.approx(ends, rel=0.06)
    _, rows = table(made.text, "mode", "waiting time per request, by reason")
    for cells, said in zip(rows, made.said["rows"], strict=True):
        parts = [] if cells[-1] == "–" else cells[-1].split(", ")
        told = [re.findall(r"^([\d.]+ \S+) (.+)$", part)[0] for part in parts]
        for seconds, reason in told:
            assert number(seconds) == pytest.approx(
                said["waits_s"][reason.replace(" ", "_")], rel=6e-3
            )


def test_capacities_of_modes_show_what_their_json_says(pages):
    made = pages["mode capacities"]
    (ratio,) = made.said["capacity"]["ratios"]
    _, found = table(made.text, "mode", "best / mode")
    assert len(found) == len(made.said["capacity"]["modes"]) == 2
    for cells, said in zip(found, made.said["capacity"]["modes"], strict=True):
        mode, capacity, interval, times, seeds = cells
        assert (mode, int(seeds)) == (said["mode"], said["n"])
        close(capacity.removesuffix(" req/s"), said["value"])
        both_ends(interval.replace(" to ", ", "), said["low"], said["high"], 1.0)
        if mode == ratio["best"]:
            assert times == "best"
        else:
            close(times.partition(" (")[0], ratio["value"])


def test_a_sweep_shows_what_its_json_says(pages):
    made = pages["sweep"]
    head, rows = table(made.text, "rate", "verdict")
    assert len(rows) == len(made.said["rows"]) == 2
    for cells, said in zip(rows, made.said["rows"], strict=True):
        for title, cell in zip(head, cells, strict=True):
            if title == "rate":
                assert cell == said["factors"]["arrivals.rate"]
            elif title in said["measures"]:
                is_rate = title == "goodput"
                estimate(cell, said["measures"][title], is_rate)
            elif title == "tokens/s per GPU":
                estimate(cell, said["benefit"], True)
            elif title == made.said["cost"]:
                estimate(cell, said["cost"])
            elif title == "n":
                assert int(cell) == said["n"]
            else:
                assert title in ("GPUs", "verdict", "Pareto front", "reports")


def test_a_sweep_begins_with_its_conclusion(pages):
    banner = pages["sweep"].text.partition('class="banner')[2].partition("</section>")[0]
    assert '<h2 id="verdict">at least 16 req/s: every load met the SLO</h2>' in banner
    said = json.loads(json.dumps(pages["sweep"].said))

    def conclude():
        return conclusion(read_section(said, SweepResult, "sweep.json"))

    said["rows"][1]["verdicts"] = {"missed": 1}
    headline, sentences = conclude()
    assert headline == "between 4 and 16 req/s; promise 4"
    assert sentences[0].startswith("Most goodput of the loads that met the SLO: ")
    said["rows"][0]["verdicts"] = {"missed": 1}
    assert conclude()[0] == "below 4 req/s: the lowest load missed the SLO"
    said["axes"].append({"key": "engine.mode", "values": ["chunked"]})
    for row in said["rows"]:
        row["factors"]["engine.mode"] = "chunked"
    headline, sentences = conclude()
    assert headline == "0 of 2 cells met the SLO in every run"
    assert sentences[0] == "SLO: met at no load, missed at 4/s."
    for row in said["rows"]:
        row["verdicts"] = {"no_verdict": 1}
    assert conclude()[0].endswith("of 2 cells are on the Pareto front")


def test_a_sweep_whose_runs_cannot_be_trusted_names_the_reason(pages):
    said = json.loads(json.dumps(pages["sweep"].said))
    for row, verdict in zip(said["rows"], ("met", "invalid"), strict=True):
        row["verdicts"] = {verdict: 1}
    for row in said["rows"][1:]:
        row["n_untrusted"] = said["n_untrusted"] = 1
        row["runs"][0] |= {"is_trusted": False, "reasons": ["the client waited for a core"]}

    def line():
        answered = answer(read_section(said, SweepResult, "sweep.json"))
        assert answered is not None
        return answered.text

    assert line() == (
        "at least 4 req/s; 1 of the runs is not to be trusted: the client waited for a core"
    )
    said["rows"][0]["n_untrusted"] = 1
    assert line() == ("the sweep is not to be trusted because the client waited for a core")


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


WIDER = """() => [...document.querySelectorAll('.scroll, .contents, .contents ol')]
    .filter((box) => box.scrollWidth > box.clientWidth)
    .map((box) => box.getAttribute('aria-labelledby') || box.className)"""


@pytest.mark.e2e
@needs_chromium
@pytest.mark.parametrize("kind", KINDS)
def test_every_page_is_whole_quiet_and_accessible(pages, browser, tmp_path, kind):
    path = tmp_path / "page.html"
    path.write_text(pages[kind].text)
    watched = Watched(browser, offline=True, viewport={"width": 390, "height": 800})
    page = watched.open(path)
    page.wait_for_selector("html[data-drawn]")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(WIDER) == []  # each value of a table is readable without scrolling
    names = set(json.loads(str(page.locator("#figures").text_content())))
    drawn = page.locator(".chart")
    assert {drawn.nth(k).get_attribute("id") for k in range(drawn.count())} == names
    for name in names:
        marks = f"#{name} svg .mark-group path, #{name} svg .mark-symbol path"
        assert page.locator(marks).count(), name
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = Axe().run(page).response["violations"]
        assert [(v["id"], [n["target"] for n in v["nodes"]]) for v in found] == [], scheme
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1000, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 1000
    assert watched.complaints == []
    assert watched.requests == [path.as_uri()]
    watched.close()


MISPLACED = """() => [...document.querySelectorAll('.chart svg')].flatMap((svg) => {
    const name = svg.closest('.chart').id, box = svg.getBoundingClientRect(), found = [];
    const texts = [...svg.querySelectorAll('text')]
        .filter((text) => text.textContent.trim() && getComputedStyle(text).opacity !== '0')
        .map((text) => [text.textContent, text.getBoundingClientRect()])
        .filter(([, at]) => at.width > 0);
    texts.forEach(([text, at], k) => {
        if (at.left < box.left - 1 || at.right > box.right + 1) found.push(`${name}: ${text} cut`);
        for (const [other, by] of texts.slice(k + 1)) {
            const wide = Math.min(at.right, by.right) - Math.max(at.left, by.left);
            const high = Math.min(at.bottom, by.bottom) - Math.max(at.top, by.top);
            if (wide > 3 && high > 3) found.push(`${name}: ${text} over ${other}`);
        }
    });
    return found;
})"""
PINNED = """() => [...document.querySelectorAll('.scroll')]
    .filter((box) => box.scrollWidth > box.clientWidth + 1 && box.querySelector('td.pin'))
    .map((box) => {
        const right = box.querySelector('td.pin').getBoundingClientRect().right;
        return Math.abs(right - box.getBoundingClientRect().right) < 2;
    })"""


@pytest.mark.e2e
@needs_chromium
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_of_a_figure_is_cut_or_covers_another(pages, browser, tmp_path, kind):
    path = tmp_path / "page.html"
    path.write_text(pages[kind].text)
    for width in (1440, 1024, 390):
        watched = Watched(browser, offline=True, viewport={"width": width, "height": 800})
        page = watched.open(path)
        page.wait_for_selector("html[data-drawn]")
        assert page.evaluate(MISPLACED) == [], width
        if width == 1440:
            assert page.evaluate(WIDER) == []
            page.set_viewport_size({"width": 700, "height": 800})
            if kind in ("modes", "rates"):
                assert page.evaluate(PINNED) == [True]  # the verdict of a table wider than the page
        watched.close()


@pytest.mark.e2e
@needs_chromium
def test_the_table_of_a_sweep_over_three_settings_is_whole_at_1440(pages, browser, cache, tmp_path):
    said = json.loads(json.dumps(pages["sweep"].said))
    factors = {"engine.mode": "chunked", "engine.max_num_seqs": "256"}
    said["axes"] += [{"key": key, "values": [value]} for key, value in factors.items()]
    for row in said["rows"]:
        row["factors"] |= factors
        for found in (*row["measures"].values(), row["benefit"], row["cost"]):
            value = found["value"]
            found |= {"low": 0.876 * value, "high": 1.123 * value, "n": 3}
    path = tmp_path / "page.html"
    path.write_text(sweep_page.render(read_section(said, SweepResult, "sweep.json"), cache))
    watched = Watched(browser, offline=True, viewport={"width": 1440, "height": 900})
    page = watched.open(path)
    page.wait_for_selector("html[data-drawn]")
    assert page.locator("#cells ~ .scroll small").count() > 10
    assert page.evaluate(WIDER) == []
    watched.close()


@pytest.mark.e2e
@needs_chromium
def test_figures_of_folded_sections_are_printed(pages, browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(pages["inconclusive"].text)
    watched = Watched(browser, offline=True)
    watched.page.goto(path.as_uri())  # sections as a reader finds them
    page = watched.page
    page.wait_for_selector("html[data-drawn]")
    charts, drawn = page.locator(".chart"), page.locator(".chart > svg, .chart > div > svg")
    before = drawn.count()
    page.evaluate(
        "addEventListener('afterprint', () => {"
        "document.body.dataset.printed = document.querySelectorAll('.chart svg.marks').length})"
    )
    page.pdf()
    assert before < charts.count()
    assert page.locator("body").get_attribute("data-printed") == str(charts.count())
    watched.close()
