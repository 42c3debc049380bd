"""The page on the errors of the simulator: every published figure, as the script predicts it."""

import json
from collections import Counter

import pytest
import simulator_error
from simulator_error import KINDS, PAGE, PUBLISHED, Figure, in_order, page, predicted, read_figures

FIGURES_PER_ROW = {"closed_loop": 3}
QUICK = ("vllm_ci", "bench_data", "vidur", "own_h200")
PUBLISHED_DATA = json.loads(PUBLISHED.read_text())


def test_the_page_is_what_the_script_makes_of_the_stored_result():
    assert PAGE.read_text(encoding="utf-8") == page(PUBLISHED_DATA, read_figures())


def test_no_published_figure_is_left_out():
    expected: Counter[str] = Counter()
    for table in PUBLISHED_DATA["tables"]:
        expected[table["source"]] += len(table["rows"]) * FIGURES_PER_ROW.get(table["kind"], 1)
        assert table["kind"] in KINDS
    assert Counter(figure.source for figure in read_figures()) == expected
    assert set(expected) == set(PUBLISHED_DATA["sources"])


@pytest.mark.parametrize("source", QUICK)
def test_the_stored_predictions_are_those_of_the_present_simulator(source):
    stored = [figure for figure in read_figures() if figure.source == source]
    for now, then in zip(predicted(PUBLISHED_DATA, source), stored, strict=True):
        assert (now.case, now.unit, now.published) == (then.case, then.unit, then.published)
        assert now.predicted == pytest.approx(then.predicted, rel=1e-6)


def test_a_worked_prediction_is_in_the_result():
    """8B on an H200 reads 131 072 bytes of KV for each of 32 · 1024 tokens at 0.75 · 4.3 TB/s: 1.33
    ms; with 3.56 ms of weights, 32 · 19 µs and 0.36 ms of overhead, 5.87 ms of 6.07."""
    (figure,) = [f for f in read_figures() if "8b on h200, 32 × 1024 tokens" in f.case]
    assert figure.published == 6.0705
    assert figure.predicted == pytest.approx(1.33 + 3.56 + 0.608 + 0.3 + 0.064, abs=0.01)
    assert figure.error == pytest.approx(-0.0336, abs=1e-3)


def test_pairs_are_in_order_within_a_unit():
    figures = [
        Figure("a", "", unit, theirs, ours)
        for unit, theirs, ours in [("ms", 1, 5), ("ms", 2, 4), ("ms", 3, 9), ("tokens/s", 7, 1)]
    ]
    assert in_order(figures) == pytest.approx(2 / 3)  # 1 < 3 and 2 < 3, not 1 < 2


def test_a_result_of_one_source_is_not_stored(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["simulator_error.py", "--only", "vidur", "--write"])
    with pytest.raises(SystemExit):
        simulator_error.main()
    assert "all sources" in capsys.readouterr().err
