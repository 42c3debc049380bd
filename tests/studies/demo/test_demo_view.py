"""Rows, verdicts and the page of a demonstration made by hand."""

import math

import pytest
from msgspec import structs

from loadgen.manifest.sections import HostSection
from loadgen.studies.demo import view
from loadgen.studies.demo.figures import Figures
from loadgen.studies.demo.page import render
from loadgen.studies.demo.result import Demo, Load, Observation, Tool

TRUTH = Figures(400, 0.050, 0.051, 0.010, 0.0101, 0.012)
STALLED = Figures(400, 0.050, 0.051, 0.0147, 0.0102, 0.310)


def run(phase, number, reported, *, truth=TRUTH, held=40.0, invalid=()):
    return Observation(phase, number, truth, reported, 0, held, 1.5, 58.6, 90.0, 0.0004, invalid)


def tool(name, *observations, state="measured", reason="", command=None):
    return Tool(
        name=name, version="1.2", command=command or f"{name} --url {{url}}", state=state,
        settings="", reason=reason, observations=observations,
    )  # fmt: skip


OURS = tool(
    "slobench",
    run("steady", 1, TRUTH),
    run("stalls", 1, STALLED, truth=STALLED),
    run("steady", 2, Figures(400, 0.0504, 0.0514, 0.010, 0.0101, 0.013)),
    run("stalls", 2, STALLED, truth=STALLED),
)
HIGH = tool(
    "high",
    run("steady", 1, Figures(400, 0.0545, 0.091, 0.010, math.nan, math.nan), held=34.0),
    run("stalls", 1, Figures(400, 0.0545, 0.091, 0.0147, math.nan, math.nan), truth=STALLED),
)
BROKEN = tool("broken", state="failed", reason="exit status 1")
ABSENT = tool("absent", state="not installed", reason="pip install absent")


def demo(*tools):
    return Demo(
        slobench="1.0", command=("slobench", "demo", "truth"),
        host=HostSection("secret-host", 4, "A CPU", "Linux", "3.11"),
        load=Load(40, 10, 2, 64, 64, 0.05, 0.01, 200, 0.3), limit_s=0.005, tools=tools, exit_code=0,
    )  # fmt: skip


def test_a_row_has_the_true_figures_next_to_the_reported():
    ours, high = view.steady_rows(demo(OURS, HIGH, BROKEN, ABSENT))
    assert ours == ("slobench", "50.0", "50.2", "51.0", "51.2", "40", "40", "59", "agrees")
    assert high[:8] == ("high", "50.0", "54.5", "51.0", "91.0", "40", "34", "59")
    assert high[8] == "p99 40 ms too high, rate 15 % low"


def test_the_rows_of_the_stalls_name_the_figures_that_notice():
    ours, high = view.stall_rows(demo(OURS, HIGH))
    assert ours == ("slobench", "10.2", "10.2", "14.7", "14.7", "310.0", "310.0",
                    "p99 TPOT, longest gap")  # fmt: skip
    assert high == ("high", "10.2", "–", "14.7", "14.7", "310.0", "–", "p99 TPOT")


def test_the_headline_counts_the_tools_that_agree():
    honest = structs.replace(OURS, name="honest")
    assert view.headline(demo(OURS, HIGH, honest, BROKEN)) == (
        "slobench: agrees with the server's log; 1 of 2 other tools agree"
    )
    assert view.headline(demo(OURS)).endswith("; no other tool ran")


def test_an_invalid_run_of_ours_is_shown_as_such():
    steady = run("steady", 1, TRUTH, invalid=("its core was busy",))
    invalid = structs.replace(OURS, observations=(steady, *OURS.observations[1:]))
    result = demo(invalid, HIGH)
    assert view.headline(result).startswith("slobench: INVALID (1 of 2 runs); 0 of 1")
    assert view.steady_rows(result)[0][-1] == "INVALID (1 of 2 runs)"
    assert "INVALID: slobench, round 1, steady: its core was busy" in list(view.lines(result))
    assert "its core was busy" in render(result)


def test_a_failed_slobench_is_the_headline():
    failed = tool("slobench", state="failed", reason="exit status 2")
    assert view.headline(demo(failed, HIGH)) == (
        "slobench: failed: exit status 2; 0 of 1 other tools agree"
    )


def test_the_page_has_the_settings_the_method_and_what_was_not_measured():
    page = render(demo(OURS, HIGH, BROKEN, ABSENT))
    for text in (
        "<pre tabindex=\"0\">high --url {url}</pre>", "failed: exit status 1",
        "not installed: pip install absent", "A CPU, 4 cores", "<h3>slobench 1.2</h3>",
        "Every tool sends 40 requests/s (Poisson) for 10 s", "one step in 200 takes 300 ms longer",
        "within 5 ms of the true ones", "at most 0.4 ms late",
    ):  # fmt: skip
        assert text in page, text
    assert "secret-host" not in page  # the page is for sharing


@pytest.mark.parametrize("text", ["tool <script>alert(1)</script>"])
def test_a_command_cannot_become_code(text):
    page = render(demo(OURS, tool("x", *HIGH.observations, command=text)))
    assert text not in page
    assert "tool &lt;script&gt;alert(1)&lt;/script&gt;" in page
