"""The section on causes: figures that can be drawn, and sentences that say what they show."""

from typing import Any

import numpy as np
import pytest
import vl_convert

from loadgen.measure.aggregate import summarize
from loadgen.measure.per_request import per_request
from loadgen.records import Run
from reports.run.causes import CauseFigure, cause_figures
from tests.runs import measured_run


def causes_of(run: Run) -> dict[str, CauseFigure]:
    return {figure.name: figure for figure in cause_figures(run, summarize(run), per_request(run))}


def drawn(spec: dict[str, Any]) -> str:
    return vl_convert.vegalite_to_svg({**spec, "width": 400})


@pytest.mark.parametrize("n_failed", [0, 5])
def test_every_figure_is_drawn(n_failed: int) -> None:
    run = measured_run(n_failed=n_failed)
    run.request_rows["input_tokens"] = np.arange(len(run.request_rows)) % 50 * 10 + 10
    found = causes_of(run)
    assert set(found) == {"why-split", "why-ttft", "why-tpot", "why-itl"}
    for name, why in found.items():
        svg = drawn(why.spec)
        assert "<path" in svg, name
        assert "NaN" not in svg, name
        assert "undefined" not in svg, name


def test_a_slope_is_said_with_its_unit_and_how_sure_it_is() -> None:
    run = measured_run()
    rows = run.request_rows
    tokens = np.arange(len(rows)) % 50 * 10 + 10
    moved_s = tokens * 0.001 - (rows["first_token_s"] - rows["sent_s"])
    for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s"):
        rows[name] += moved_s
    rows["input_tokens"] = tokens
    assert causes_of(run)["why-ttft"].sentence == (
        "TTFT grows by 1 s per 1 000 prompt tokens (95 % confidence interval 1 s to 1 s,"
        " rank correlation 1.00, n = 200)."
    )


def test_what_a_server_does_not_tell_is_said() -> None:
    run = measured_run()
    assert "does not report" in causes_of(run)["why-split"].sentence
    run.request_rows["server_queue_s"] = 0.03
    assert "does not report" not in causes_of(run)["why-split"].sentence


def test_a_run_without_answers_has_no_such_section() -> None:
    assert causes_of(measured_run(0)) == {}


def test_a_scatter_against_a_constant_is_left_out() -> None:
    run = measured_run()
    run.request_rows["input_tokens"] = 400
    assert "why-ttft" not in causes_of(run)


@pytest.mark.parametrize(("grows", "n_layers"), [(True, 2), (False, 1)])
def test_a_line_is_drawn_only_where_the_sentence_claims_a_relation(
    grows: bool, n_layers: int
) -> None:
    run = measured_run()
    rows = run.request_rows
    tokens = np.random.default_rng(5).permutation(len(rows)) + 10
    rows["input_tokens"] = tokens
    if grows:
        for name in ("first_chunk_s", "first_token_s", "first_answer_s", "last_token_s", "done_s"):
            rows[name] += tokens * 0.001
    why = causes_of(run)["why-ttft"]
    assert len(why.spec["layer"]) == n_layers
    assert why.sentence.startswith("TTFT grows by" if grows else "No clear relation")
