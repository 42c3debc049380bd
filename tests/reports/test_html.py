"""The page: same numbers as summary.json, no network, hostile text inert, every kind of run."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from loadgen.measure.aggregate import summarize
from loadgen.records import Names, Run, Status
from reports.run.page import render
from tests.runs import (
    cut_off,
    measured_run,
    starved,
    traffic,
    two_classes,
    with_manifest,
)
from tests.shown import number

GOLDEN = Path(__file__).parents[1] / "golden" / "reports"
SLO = ["ttft <= 150ms", "attainment >= 95%", "p99(ttft) <= 300ms", "p99(itl) <= 20ms"]
HOSTILE = "</script><script>alert(1)</script><!-- \"'><img src=x onerror=alert(2)>\u2028{{7*7919}}"


def page_of(run: Run, cache: Path) -> str:
    return render(run, summarize(run), cache)


class Page(HTMLParser):
    """What a browser would make of it: tags with attributes, and texts of elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.numbers: list[tuple[str, str, str]] = []  # path, unit, text
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self._number: list[str] = []
        self._in_value = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._open.append(tag)
        if found.get("data-path"):
            self._number = [str(found["data-path"]), str(found["data-unit"])]
        if tag == "span" and found.get("class") == "value" and self._number:
            self._in_value = True
        if tag == "script":
            self.scripts.append((found, ""))

    def handle_endtag(self, tag: str) -> None:
        self._in_value = False

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script" and self.scripts[-1][1] == "":
            self.scripts[-1] = (self.scripts[-1][0], data)
            self._open.append("after")
        elif self._in_value:
            self.numbers.append((self._number[0], self._number[1], data))
            self._number = []
        self.texts.append(data)

    @property
    def text(self) -> str:
        scripts = {content for _, content in self.scripts}
        return "\n".join(t for t in self.texts if t not in scripts)


def structure(page: str) -> str:
    """The page without its style and scripts, one tag per line."""
    page = re.sub(r"<style>.*?</style>", "<style></style>", page, flags=re.S)
    page = re.sub(r"(<script[^>]*>).*?(</script>)", r"\1\2", page, flags=re.S)
    page = re.sub(r"sha256-[\w+/=]+", "sha256-…", page)
    return "\n".join(line for line in page.splitlines() if line.strip()) + "\n"


def test_the_page_of_a_fixed_run_is_the_golden_one(cache: Path, check_golden: Any) -> None:
    check_golden(
        GOLDEN / "missed.html", structure(page_of(measured_run(slo=SLO, n_failed=5), cache))
    )


def at(content: Any, path: str) -> Any:
    """A JSON value by its dotted path; keys such as p99.9 hold a dot themselves."""
    if not path:
        return content
    if isinstance(content, list):
        first, _, rest = path.partition(".")
        return at(content[int(first)], rest)
    key = max((k for k in content if path == k or path.startswith(f"{k}.")), key=len)
    return at(content[key], path[len(key) + 1 :])


@pytest.mark.parametrize(
    "run",
    [
        measured_run(slo=[*SLO, "goodput >= 9/s", "error_rate <= 1%"]),
        measured_run(slo=[*SLO, "goodput >= 9/s", "error_rate <= 1%"], n_failed=5),
        two_classes(chat=SLO, rag=["ttft <= 2s"], n_failed=5),
    ],
    ids=["all well", "failures", "classes"],
)
def test_every_number_on_the_page_is_the_one_in_the_summary(cache: Path, run: Run) -> None:
    summary = summarize(run)
    numbers = Page(render(run, summary, cache)).numbers
    assert len(numbers) > 130
    content = summary.to_json()
    for path, _, text in numbers:
        shown, expected = number(text), at(content, path)
        if expected is None:
            assert shown is None, (path, text)
        else:
            assert shown == pytest.approx(expected, rel=5.1e-3), (path, text)


def test_a_card_shows_the_bound_that_the_proof_uses(cache: Path) -> None:
    """200 of 200: 0.05^(1/200) = 98.51 %."""
    page = page_of(measured_run(slo=["ttft <= 1s", "attainment >= 98.5%", "goodput >= 9/s"]), cache)
    bound = "at least 98.5 % with 95 % confidence"
    tile = page[page.index("<h3>SLO attainment</h3>") :].partition("</div>")[0]
    assert f"<small>200 of 200 due; {bound}</small>" in tile
    goodput = page[page.index("<h3>Goodput</h3>") :].partition("</div>")[0]
    assert "<small>at least 9.85/s with 95 % confidence</small>" in goodput
    slos = page[page.index('<h2 id="slos">') :].partition("</section>")[0]
    assert slos.count("at least 98.5 %") == 2
    assert "[" not in slos


def test_the_slos_of_classes_stand_in_the_table_of_slos(cache: Path) -> None:
    page = page_of(two_classes(chat=["ttft <= 500ms"], rag=["p50(ttft) <= 2s"]), cache)
    slos = page[page.index('<h2 id="slos">') :].partition("</section>")[0]
    heads = re.findall(r'<th scope="row">(.*?)</th>', slos)
    assert heads == [
        "chat: ttft &lt;= 500ms",
        "chat: attainment &gt;= 99% (default)",
        "rag: p50(ttft) &lt;= 2s",
    ]
    assert 'data-path="classes.rag.slo.0.bound.value"' in slos


def test_the_page_shows_the_three_rates(cache: Path) -> None:
    def tile(run: Run) -> str:
        page = page_of(run, cache)
        return page[page.index("<h3>Achieved rate</h3>") :].partition("</div>")[0]

    open_loop = tile(with_manifest(measured_run(), requested_rate_per_s=10.5))
    assert "<small>requested 10.5/s, offered 10/s</small>" in open_loop
    classes = {"default": traffic(is_closed_loop=True)}
    closed = tile(with_manifest(measured_run(), classes=classes))
    assert '<span class="value">10/s</span>' in closed
    assert "<small>requested n/a, offered n/a (closed loop: " in closed


def test_without_a_per_request_limit_the_page_shows_no_attainment(cache: Path) -> None:
    page = page_of(measured_run(slo=["p99(ttft) <= 50ms"]), cache)
    tile = page[page.index("<h3>SLO attainment</h3>") :].partition("</div>")[0]
    assert '<span class="value">n/a</span>' in tile
    assert "<small>no per-request limit</small>" in tile
    assert 'id="heat-attainment"' not in page_of(two_classes(), cache)
    assert 'id="heat-attainment"' in page_of(two_classes(slo=SLO), cache)


def test_the_page_carries_its_summary_for_machines(cache: Path) -> None:
    run = measured_run(slo=SLO)
    scripts = {attrs.get("id"): text for attrs, text in Page(page_of(run, cache)).scripts}
    assert json.loads(scripts["summary"]) == json.loads(json.dumps(summarize(run).to_json()))
    assert set(json.loads(scripts["figures"])) == {
        "spectrum-ttft", "spectrum-tpot", "spectrum-itl", "spectrum-e2e", "timeline",
        "why-split", "why-tpot", "why-itl", "slowest",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (measured_run(slo=SLO), "MET"),
        (with_manifest(measured_run(slo=SLO), command=[]), "MET"),
        (measured_run(slo=["p50(ttft) <= 10ms"]), "MISSED"),
        (measured_run(), "NO VERDICT"),
        (starved(measured_run(slo=SLO)), "INVALID: NO VERDICT"),
        (with_manifest(measured_run(slo=SLO), ended="interrupted"), "NO VERDICT"),
        (measured_run(220, n_failed=220, slo=SLO), "MISSED"),
        (measured_run(1, slo=SLO), "NO VERDICT"),
        (measured_run(0, slo=SLO), "NO VERDICT"),
    ],
    ids=[
        "met",
        "from Python",
        "missed",
        "nothing asked",
        "invalid",
        "interrupted",
        "all failed",
        "one",
        "empty",
    ],
)
def test_every_kind_of_run_has_a_page_with_its_verdict_first(
    run: Run, word: str, cache: Path
) -> None:
    page = page_of(run, cache)
    assert f"<title>{word}: " in page
    assert page.index(f"</span> {word}") < page.index("<table")
    for reason in summarize(run).reasons:
        assert reason in Page(page).text


def hostile_run() -> Run:
    run = measured_run(slo=SLO, n_failed=2)
    names = Names(errors=("", HOSTILE), remotes=("", HOSTILE))
    target = {"model": HOSTILE, "labels": {"flags": HOSTILE}}
    scenario = {"source": HOSTILE, "text": HOSTILE, "name": HOSTILE}
    return replace(
        with_manifest(
            run, run=HOSTILE, target=target, scenario=scenario, end_reason=HOSTILE,
            ended="interrupted", command=["slobench", HOSTILE], host={"hostname": HOSTILE},
            preflight=[{"check": HOSTILE, "ok": None, "detail": HOSTILE}],
        ),
        names=names,
    )  # fmt: skip


def test_hostile_names_and_errors_stay_text(cache: Path) -> None:
    plain = Page(page_of(measured_run(slo=SLO, n_failed=2), cache))
    hostile = Page(page_of(hostile_run(), cache))
    assert "alert(1)" in hostile.text
    assert len(hostile.scripts) == len(plain.scripts) == 8
    assert not [tag for tag, _ in hostile.tags if tag in ("img", "iframe", "object", "link")]
    assert not [a for _, attrs in hostile.tags for a in attrs if a.startswith("on")]
    assert "55433" not in [text.strip() for text in hostile.texts]
    for attrs, content in hostile.scripts:
        if attrs.get("type") == "application/json":
            json.loads(content)
            assert not re.search(r"[<>&\u2028]", content)


def test_nothing_is_loaded_from_anywhere(cache: Path) -> None:
    page = Page(page_of(measured_run(slo=SLO), cache))
    loading = {"src", "href", "srcset", "action", "data", "poster", "background", "ping"}
    assert not [(tag, a) for tag, attrs in page.tags for a in attrs if a in loading]
    own = re.sub(r"<script>.*?</script>", "", page_of(measured_run(slo=SLO), cache), flags=re.S)
    addresses = set(re.findall(r"https?://[^\s\"'<]+", own))
    assert addresses == {
        "http://127.0.0.1:8000",  # the target, as text
        "https://vega.github.io/schema/vega-lite/v6.json",  # names the format; never fetched
    }
    assert "url(" not in own
    assert "@import" not in own


def test_only_the_pages_own_scripts_may_run(cache: Path) -> None:
    page = Page(page_of(measured_run(slo=SLO), cache))
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv")) or ""
    executed = [text for attrs, text in page.scripts if not attrs.get("type")]
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    assert allowed == [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in executed
    ]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy
    assert "unsafe-inline" not in policy.partition("style-src")[0]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (
            "run chat.yaml --target=sim --set arrivals.rate=8/s --engine shape=8b --set seed=3",
            "slobench capacity scenarios/quickstart.yaml --set arrivals.rate=8/s --set seed=3"
            " --target sim --engine shape=8b",
        ),
        ("nightly night.yaml", None),
    ],
)
def test_a_met_run_says_which_command_finds_how_much_more(command, told, cache: Path) -> None:
    run = with_manifest(measured_run(slo=SLO), command=["slobench", *command.split()])
    text = Page(page_of(run, cache)).text
    asked = [line.strip() for line in text.splitlines() if "slobench capacity" in line]
    assert asked == ([] if told is None else [told])


def test_unfinished_requests_are_counted_apart_from_failures(cache: Path) -> None:
    page = Page(page_of(cut_off(measured_run(slo=SLO, n_failed=2), slice(100, 110)), cache))
    assert ("counts.failed", "2") in {(path, text.strip()) for path, _, text in page.numbers}
    assert ("counts.unfinished", "10") in {(path, text.strip()) for path, _, text in page.numbers}
    assert "of 200 due, 10 unfinished" in page.text
    assert "10 unfinished requests have no point." in page.text
    assert "cancelled" not in page.text.partition("How requests failed")[2].partition("Prov")[0]


def test_keys_on_the_command_line_are_not_shown(cache: Path) -> None:
    run = with_manifest(
        measured_run(),
        command=["slobench", "run", "--set", "api_key=s3cr3t-value", "--target", "http://u:pw@h/"],
    )
    page = page_of(run, cache)
    assert "s3cr3t-value" not in page
    assert "u:pw@" not in page


def test_failures_are_told_by_kind_with_their_first_instant(cache: Path) -> None:
    run = measured_run(slo=SLO, n_failed=5)
    run.request_rows["status"][40], run.request_rows["error_id"][40] = Status.timeout, 0
    text = Page(page_of(run, cache)).text
    assert "HTTP 503: overloaded" in text
    assert "http error 503" in text
    assert "timeout" in text
    assert "curl -sSN http://127.0.0.1:8000/v1/chat/completions" in text


def test_a_key_that_the_server_echoes_in_an_error_is_not_on_the_page(cache: Path) -> None:
    run = measured_run(n_failed=3, slo=SLO)
    echo = "HTTP 401: Incorrect API key provided: sk-s3cr3ts3cr3t; got 'Bearer s3cr3t-too'"
    page = page_of(replace(run, names=Names(errors=("", echo), remotes=run.names.remotes)), cache)
    assert "s3cr3t" not in page
    assert "HTTP 401: Incorrect API key provided: [redacted]" in Page(page).text


def test_a_key_in_how_the_run_ended_is_not_on_the_page(cache: Path) -> None:
    run = measured_run(slo=SLO)
    run.request_rows["status"][50] = Status.lost
    why = "load-generating process 0 died (exit status 1; ValueError: Bearer s3cr3ts3cr3t)"
    assert "s3cr3t" not in page_of(with_manifest(run, end_reason=why), cache)


def test_classes_stand_side_by_side_where_there_are_any(cache: Path) -> None:
    run = two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 500ms"])
    page = Page(page_of(run, cache))
    paths = {path for path, _, _ in page.numbers}
    assert {"classes.chat.attainment.value", "classes.rag.goodput.requests_per_s.value"} <= paths
    assert "✓ met" in page.text
    assert "✗ missed" in page.text
    assert 'id="classes"' not in page_of(measured_run(slo=SLO), cache)
