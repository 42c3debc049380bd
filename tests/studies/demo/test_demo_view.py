"""Rows, verdicts and the page of a demonstration made by hand."""

from dataclasses import replace

import pytest
from msgspec import structs

from loadgen.studies.demo import view
from loadgen.studies.demo.page import render
from tests.studies.demo.made_up import (
    ABSENT,
    BROKEN,
    HIGH,
    OURS,
    TRUTH,
    demonstration,
    observation,
    tool,
)


def test_a_row_has_the_true_figures_next_to_the_reported():
    ours, high = view.steady_rows(demonstration(OURS, HIGH, BROKEN, ABSENT))
    assert ours == ("slobench", "50.0", "50.2", "51.0", "51.2", "40", "40", "59", "agrees")
    assert high[:8] == ("high", "50.0", "54.5", "51.0", "91.0", "40", "34", "59")
    assert high[8] == "p99 40 ms too high, rate 15 % low"


def test_the_rows_of_the_stalls_name_the_figures_that_notice():
    ours, high = view.stall_rows(demonstration(OURS, HIGH))
    assert ours == ("slobench", "10.2", "10.2", "14.7", "14.7", "310.0", "310.0",
                    "p99 TPOT, longest gap")  # fmt: skip
    assert high == ("high", "10.2", "–", "14.7", "14.7", "310.0", "–", "p99 TPOT")


def test_the_headline_counts_the_tools_that_agree():
    honest = structs.replace(OURS, name="honest")
    assert view.headline(demonstration(OURS, HIGH, honest, BROKEN)) == (
        "slobench: agrees with the server's log; 1 of 2 other tools agree"
    )
    assert view.headline(demonstration(OURS)).endswith("; no other tool ran")


def test_an_invalid_run_of_ours_is_shown_as_such():
    steady = observation("steady", 1, TRUTH, invalid=("its core was busy",))
    invalid = structs.replace(OURS, observations=(steady, *OURS.observations[1:]))
    result = structs.replace(demonstration(invalid, HIGH), exit_code=3)
    # what keeps slobench from measuring may have kept the others, too
    assert view.headline(result) == (
        "slobench: INVALID (1 of 2 runs); no conclusion about others from these runs"
    )
    assert view.steady_rows(result)[0][-1] == "INVALID (1 of 2 runs)"
    assert "INVALID: slobench, round 1, steady: its core was busy" in list(view.lines(result))
    assert "its core was busy" in render(result)


def test_a_failed_slobench_is_the_headline():
    failed = tool("slobench", state="failed", reason="exit status 2")
    result = structs.replace(demonstration(failed, HIGH), exit_code=3)
    assert view.headline(result).startswith("slobench: failed: exit status 2; no conclusion")


def test_an_invalid_run_with_the_stalling_server_leaves_the_conclusion_about_the_steady():
    runs = OURS.observations[0], replace(OURS.observations[1], invalid=("its core was busy",))
    result = structs.replace(
        demonstration(structs.replace(OURS, observations=runs), HIGH), exit_code=3
    )
    assert view.headline(result).endswith("agrees with the server's log; 0 of 1 other tools agree")
    assert view.stall_rows(result)[0][-1] == "INVALID; p99 TPOT, longest gap"


def test_an_invalid_run_of_ours_that_differs_says_both():
    late = replace(TRUTH, ttft_p99_s=0.0573)
    runs = observation("steady", 1, late, invalid=("its core was busy",)), *OURS.observations[1:2]
    result = demonstration(structs.replace(OURS, observations=runs))
    assert view.verdict(result.tools[0], result) == "INVALID (1 of 1 runs), p99 6.3 ms too high"


def test_the_page_has_the_settings_the_method_and_what_was_not_measured():
    page = render(demonstration(OURS, HIGH, BROKEN, ABSENT))
    for text in (
        "<code>high --url {url}</code>", "failed: exit status 1",
        "not installed: pip install absent", "A CPU, 4 cores", "<h3>slobench 1.2</h3>",
        "Every tool sends 40 requests/s (Poisson) for 10 s", "one step in 200 takes 300 ms longer",
        "within 5 ms of the true ones", "400 µs late at most",
    ):  # fmt: skip
        assert text in page, text
    assert "secret-host" not in page  # the page is for sharing


@pytest.mark.parametrize("text", ["tool <script>alert(1)</script>"])
def test_a_command_cannot_become_code(text):
    page = render(demonstration(OURS, tool("x", *HIGH.observations, command=text)))
    assert text not in page
    assert "tool &lt;script&gt;alert(1)&lt;/script&gt;" in page
