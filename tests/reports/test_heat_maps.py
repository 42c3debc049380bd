"""Attainment by lengths and class: every due request is in exactly one cell."""

import numpy as np
import vl_convert
from hypothesis import given
from hypothesis import strategies as st

from loadgen.measure.attainment import due_rows
from reports.run.heat_maps import MOST_BUCKETS, attainment_cells, heat_figures
from tests.runs import measured_run, two_classes


@given(st.lists(st.integers(1, 5000), min_size=220, max_size=220), st.integers(0, 2**32))
def test_cells_hold_every_due_request_once(lengths, seed):
    run = two_classes()
    run.schedule_rows["input_tokens"] = lengths
    due, kept = due_rows(run), np.random.default_rng(seed).random(220) < 0.5
    cells = attainment_cells(run, due, kept)
    assert sum(cell["n"] for cell in cells) == 200
    assert round(sum(cell["n"] * cell["share"] for cell in cells)) == np.count_nonzero(due & kept)
    assert len({(c["class"], c["input"], c["output"]) for c in cells}) == len(cells)
    assert len({cell["input"] for cell in cells}) <= MOST_BUCKETS


def test_a_run_of_one_kind_of_request_has_no_heat_map():
    run = measured_run()
    cells = attainment_cells(run, due_rows(run), due_rows(run))
    assert [(c["input"], c["output"], c["n"], c["share"]) for c in cells] == [("100", "20", 200, 1)]
    assert heat_figures(cells, {}) == {}


def test_the_figures_are_valid_and_carry_their_numbers():
    run = two_classes()
    run.schedule_rows["input_tokens"][::2] = 4000
    cells = attainment_cells(run, due_rows(run), np.arange(220) % 4 != 0)
    pairs = {("chat", "rag"): 0.91, ("chat", "chat"): None}
    drawn = heat_figures(cells, pairs)
    svgs = {name: vl_convert.vegalite_to_svg(spec) for name, spec in drawn.items()}
    assert ">100%<" in svgs["heat-attainment"]
    assert ">0.91<" in svgs["heat-interference"]


def test_a_map_of_equal_shares_is_left_out():
    cells = [{"class": "a", "input": str(k), "input_order": k, "output": "1", "output_order": 0,
              "n": 9, "share": 1.0} for k in range(4)]  # fmt: skip
    assert heat_figures(cells, {}) == {}
    cells[2]["share"] = 0.9
    assert set(heat_figures(cells, {})) == {"heat-attainment"}
