"""What varies, read and spread out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from loadgen.studies.sweep.axes import Axis, axis, label, number, points, read_axis


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("arrivals.rate=2/s,4/s", "arrivals.rate", ("2/s", "4/s")),
        ("rate=2:10:4/s", "arrivals.rate", ("2/s", "6/s", "10/s")),
        ("rate=0.5:1:0.25/s", "arrivals.rate", ("0.5/s", "0.75/s", "1/s")),
        ("concurrency=1:3:1,64", "concurrency", (1, 2, 3, 64)),
        ("engine.mode=[chunked, static]", "engine.mode", ("chunked", "static")),
        ("slo=[ttft <= 5ms],[ttft <= 1s]", "slo", (["ttft <= 5ms"], ["ttft <= 1s"])),
        ("launch.args=--tp 1,--tp 2 --x", "launch.args", ("--tp 1", "--tp 2 --x")),
        ("engine='mode=a,b=1',mode=c", "engine", ("mode=a,b=1", "mode=c")),
        ("a={kind: fixed, tokens: 64},5", "a", ({"kind": "fixed", "tokens": 64}, 5)),
        ("target=http://a:1,http://b:2", "target", ("http://a:1", "http://b:2")),
        ("phases.measure=1:30", "phases.measure", ("1:30",)),
    ],
)
def test_values_are_yaml_with_commas_and_ranges(text, key, values):
    assert read_axis(text) == Axis(key, values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rate", "expected key=value,value"),
        ("=3", "expected key=value,value"),
        ("rate=", "expected key=value,value"),
        ("rate=2/s,4/s,2/s", "--over rate=2/s,4/s,2/s: rate: the value 2/s appears twice"),
        ("rate=4:2:1/s", "the range 4:2:1/s: from, to and step give no values"),
        ("rate=1:2:0/s", "give no values"),
        ("rate=1:100:0.001/s", "has 99001 values; the limit is 10000"),
        ("rate=[2/s", "--over rate=[2/s"),
    ],
)
def test_what_cannot_be_meant_is_told(text, words):
    with pytest.raises(UsageError) as told:
        read_axis(text)
    assert words in str(told.value)


AXES = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), min_size=1, max_size=3
).map(lambda lists: [Axis(f"k{n}", tuple(values)) for n, values in enumerate(lists)])


@given(AXES)
def test_a_grid_is_every_combination_once(axes):
    found = [tuple(point.values()) for point in points(axes, "grid")]
    assert found == list(itertools.product(*(one.values for one in axes)))
    assert len(set(found)) == len(found)


def test_zip_takes_the_kth_values_together():
    axes = [Axis("a", (1, 2)), Axis("b", ("x", "y"))]
    assert points(axes, "zip") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(UsageError, match="a has 2, c has 1"):
        points([axes[0], Axis("c", (1,))], "zip")


def test_a_key_stands_once_and_something_has_to_vary():
    with pytest.raises(UsageError, match="--over a: this key appears twice"):
        points([Axis("a", (1,)), Axis("a", (2,))], "grid")
    with pytest.raises(UsageError, match="name a key to vary"):
        points([], "grid")
    many = [Axis(f"k{n}", tuple(range(25))) for n in range(3)]
    with pytest.raises(UsageError, match="15625 cells; the limit is 10000"):
        points(many, "grid")


def test_a_file_gives_lists():
    assert axis("rate", ["2:4:1/s"]) == Axis("arrivals.rate", ("2/s", "3/s", "4/s"))


@pytest.mark.parametrize("wrong", ["2/s", [], None])
def test_a_file_that_gives_no_list_is_told(wrong):
    with pytest.raises(UsageError, match="expected a list of values"):
        axis("rate", wrong)


def test_labels_and_numbers():
    assert [label(v) for v in ("2/s", 5, True, {"a": 1})] == ["2/s", "5", "true", '{"a": 1}']
    assert [number(v) for v in ("2/s", 5, "1e3ms", True, "fast", None)] == [2, 5, 1000] + [None] * 3
    assert Axis("a", ("2/s", "4/s")).numbers() == [2.0, 4.0]
    assert Axis("a", ("2/s", "x")).numbers() is None
