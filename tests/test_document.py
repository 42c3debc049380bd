"""Documents: plain values from YAML that know their lines, without YAML 1.1's surprises."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.errors import TargetFileError, UsageError
from loadgen.yaml_document import override, parse_document, write_document

SAMPLE = """\
name: evening
arrivals:
  kind: poisson
  rate: 8/s
slo:
  - ttft <= 1s
  - tpot <= 50ms
"""

leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")))
    | st.sampled_from(["on", "no", "1e3", "1:30", "2024-01-01", "~", "null", ".5", "0o7", "12/s"])
)
keys = st.from_regex(r"[a-z_]{1,12}", fullmatch=True)
mappings = st.dictionaries(
    keys,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
    ),
    min_size=1,
    max_size=5,
)


def read(text):
    return parse_document(text, "file.yaml", UsageError)


@settings(max_examples=50)
@given(mappings)
def test_what_is_written_reads_back(values):
    document = read(write_document(values))
    document.raise_mistakes()
    assert document.values == values


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "y", "1:30", "2024-01-01", "0x1F", "="])
def test_words_stay_words(word):
    assert read(f"key: {word}").values == {"key": word}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e3", 1000.0), (".5", 0.5), ("007", 7), ("~", None), ("", None), ("true", True), ("-3", -3)],
)
def test_numbers_and_nothing_follow_yaml_1_2(text, value):
    assert read(f"key: {text}").values == {"key": value}


def test_an_integer_of_absurd_length_is_a_float_not_a_crash():
    assert read(f"key: {'9' * 5000}").values == {"key": float("inf")}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("name",), "file.yaml:1: name: wrong"),
        (("arrivals", "rate"), "file.yaml:4: arrivals.rate: wrong"),
        (("arrivals", "cv"), "file.yaml:2: arrivals.cv: wrong"),  # missing: told at its block
        (("slo", 1), "file.yaml:7: slo.1: wrong"),
        (("phases", "measure"), "file.yaml:1: phases.measure: wrong"),
        ((), "file.yaml:1: wrong"),
    ],
)
def test_a_mistake_is_told_at_its_line(path, said):
    document = read(SAMPLE)
    document.note(path, "wrong")
    with pytest.raises(UsageError) as caught:
        document.raise_mistakes()
    assert str(caught.value) == said


def test_mistakes_come_in_the_order_of_lines_and_once():
    document = read(SAMPLE)
    for path in (("slo", 0), ("name",), ("slo", 0)):
        document.note(path, "wrong")
    with pytest.raises(UsageError) as caught:
        document.raise_mistakes()
    assert str(caught.value) == "file.yaml:1: name: wrong\nfile.yaml:6: slo.0: wrong"


def test_a_document_raises_the_error_of_its_owner():
    with pytest.raises(TargetFileError, match=r"target\.yaml: is empty"):
        parse_document("", "target.yaml", TargetFileError)


def test_an_override_replaces_the_line_by_its_source():
    document = read(SAMPLE)
    override(document, ["arrivals.rate=9/s", "phases.measure=1m"])
    assert document.values["arrivals"]["rate"] == "9/s"
    assert document.values["phases"] == {"measure": "1m"}
    document.note(("arrivals", "rate"), "wrong")
    with pytest.raises(UsageError, match=r"^--set: arrivals\.rate: wrong$"):
        document.raise_mistakes()
