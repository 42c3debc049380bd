"""Observed lengths from files and lists: what they say is what is drawn, and a mistake is told with
its file and line."""

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats

from loadgen.workload.lengths import LENGTHS


def draw(spec, n=100_000):
    return LENGTHS.build(spec).draw(np.random.Generator(np.random.PCG64(81)), n)


def test_values_are_drawn_as_often_as_they_were_observed():
    counts = np.bincount(draw({"kind": "empirical", "values": [3, 9, 3, 20]}), minlength=21)
    assert np.flatnonzero(counts).tolist() == [3, 9, 20]
    assert stats.chisquare(counts[[3, 9, 20]], [50_000, 25_000, 25_000]).pvalue > 0.01


def test_weights_say_how_often():
    spec = {"kind": "empirical", "values": [500, 7, 40], "weights": [1, 0, 3]}
    counts = np.bincount(draw(spec), minlength=501)
    assert np.flatnonzero(counts).tolist() == [40, 500]
    assert stats.chisquare(counts[[40, 500]], [75_000, 25_000]).pvalue > 0.01
    lengths = LENGTHS.build(spec)
    assert lengths.mean == pytest.approx(155)
    assert lengths.sd == pytest.approx(460 * np.sqrt(3) / 4)


def test_equal_observations_are_equal_kinds():
    first, second = (LENGTHS.build({"kind": "empirical", "values": [3, 9]}) for _ in range(2))
    assert first == second
    assert first != LENGTHS.build({"kind": "empirical", "values": [3, 8]})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("column.csv", "3\n9\n3\n20\n"),
        ("header.csv", "tokens\n3\n9\n3\n20\n"),
        ("weights.csv", "tokens,weight\n3,2\n9,1\n20,1\n"),
        ("other_order.csv", "weight, model, tokens\n2,a,3\n1,b,9\n1,b,20\n"),
        ("windows.csv", "\ufefftokens\r\n3\r\n9\r\n3\r\n\r\n20\r\n"),
        ("list.json", "[3, 9, 3, 20]"),
        ("rows.json", "[[3, 2], [9, 1], [20, 1]]"),
        (
            "mappings.json",
            '[{"tokens": 3, "weight": 2}, {"tokens": 9, "weight": 1}, {"tokens": 20, "weight": 1}]',
        ),
        ("histogram.json", '{"values": [3, 9, 20], "weights": [2, 1, 1]}'),
        ("unmarked", "[3, 9, 3, 20]"),
    ],
)
def test_a_file_says_the_same_in_every_form(tmp_path, name, text):
    path = tmp_path / name
    path.write_bytes(text.encode())
    lengths = LENGTHS.build({"kind": "empirical", "path": str(path)})
    inline = LENGTHS.build({"kind": "empirical", "values": [3, 9, 3, 20]})
    support = np.arange(3, 21)
    assert lengths.support == (3, 20)
    assert np.array_equal(lengths.cdf(support), inline.cdf(support))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "a.csv: has no rows; expected tokens in each"),
        ("a.csv", "tokens\n", "a.csv: has no rows"),
        ("a.csv", "length\n3\n", "a.csv:1: has no column 'tokens'; known: length"),
        ("a.csv", "token\n3\n", "a.csv:1: has no column 'tokens'; did you mean 'token'?"),
        ("a.csv", "tokens\n3\n4.5\n", "a.csv:3: tokens 4.5 must be a whole number from 1 to"),
        ("a.csv", "tokens\n3\n0\n", "a.csv:3: tokens 0 must be a whole number from 1 to"),
        ("a.csv", "tokens\n3\nmany\n", "a.csv:3: tokens 'many' is not a number"),
        ("a.csv", "tokens\n3\nnan\n", "a.csv:3: tokens nan must be a whole number"),
        ("a.csv", "3,1\n4,-1\n", "a.csv:2: weight -1 must be 0 or more"),
        ("a.csv", "3,1\n4\n", "a.csv:2: has tokens, but the first row has tokens, weight"),
        ("a.csv", "3,1,1\n", "a.csv:1: has 3 cells; expected tokens,weight"),
        ("a.csv", "3,0\n4,0\n", "a.csv: every weight is 0"),
        ("a.json", "[3, 4", "a.json:1: is not JSON"),
        ("a.json", "3", "a.json: expected a list, got 3"),
        ("a.json", '{"value": [3]}', "got the keys value"),
        ("a.json", '{"values": [3], "weights": [1, 2]}', "lists of the same length"),
        ("a.json", "[3, true]", "a.json: entry 1: tokens True is not a number"),
        ("a.json", '[{"token": 3}]', "entry 0: has no 'tokens'; did you mean 'token'?"),
        ("a.json", "[[3, 1, 2]]", "entry 0: has 3 numbers; expected tokens, weight"),
    ],
)
def test_a_mistake_in_a_file_is_told_where_it_is(tmp_path, monkeypatch, name, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(ValidationError) as caught:
        LENGTHS.build({"kind": "empirical", "path": name})
    assert said in str(caught.value)


def test_a_file_that_is_no_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_bytes(b"tokens\n3\n\xff\n")
    with pytest.raises(ValidationError, match=r"a\.csv:3: is not UTF-8 text"):
        LENGTHS.build({"kind": "empirical", "path": "a.csv"})
