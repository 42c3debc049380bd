"""Flat traces are recognized by the usual names of their columns."""

import json
import re

import pytest

from loadgen.errors import TraceFileError
from loadgen.workload.traces.file import load_trace
from loadgen.workload.traces.synonyms import SYNONYMS


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "t.csv"
        path.write_text(content)
        return path

    return write


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("timestamp,prompt_tokens,completion_tokens", ("10", "10.5")),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", ("0.25", "0.75")),
        ("Arrival Time,Prompt Len,Output-Len", ("3", "3.5")),
        ("timestamp_ms,input_tokens,output_tokens", ("1700000000000", "1700000000500")),
        ("ts_us,isl,osl", ("1000000", "1500000")),
        ("time,request_tokens,response_tokens", ("2024-05-12 00:00:20", "2024-05-12 00:00:20.5")),
    ],
)
def test_usual_names_are_read_without_a_format(file, header, times):
    trace = load_trace(file(f"{header}\n{times[0]},5,6\n{times[1]},7,8\n"))
    assert trace.times_s.tolist() == pytest.approx([0.0, 0.5])
    assert trace.input_tokens.tolist() == [5, 7]
    assert trace.output_tokens.tolist() == [6, 8]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_another_separator_is_found_from_the_names(file, separator):
    lines = [
        ("timestamp", "prompt_tokens", "completion_tokens"),
        ("10", "5", "6"),
        ("11", "7", "8"),
    ]
    trace = load_trace(file("\n".join(map(separator.join, lines)) + "\n"))
    assert trace.times_s.tolist() == [0.0, 1.0]
    assert trace.output_tokens.tolist() == [6, 8]


@pytest.mark.parametrize(("separator", "key"), [(";", '";"'), ("\t", r'"\t"')])
def test_another_separator_is_named_where_the_names_are_not_usual(file, separator, key):
    message = f"columns a, b match no known format.*output_tokens: …, separator: {re.escape(key)}}}"
    with pytest.raises(TraceFileError, match=message):
        load_trace(file(f"a{separator}b\n1{separator}2\n"))


def test_a_line_separator_inside_a_json_text_is_part_of_its_line(file):
    """U+2028 ends a line for `str.splitlines`, but not in JSON."""
    record = {"timestamp": 10, "prompt_tokens": 5, "completion_tokens": 6, "text": "a\u2028b"}
    line = json.dumps(record, ensure_ascii=False)
    trace = load_trace(file(f"{line}\n{line}\n"))
    assert trace.input_tokens.tolist() == [5, 5]


@pytest.mark.parametrize("content", ['[{{"x": "{}"}}]', 'x,y\n"{}",1\n'])
def test_a_field_too_long_for_a_csv_reader_is_no_internal_error(file, content):
    with pytest.raises(TraceFileError, match="match no known format"):
        load_trace(file(content.format("a" * 200_000)))


def test_json_lines_are_read_by_the_same_names(file):
    rows = [{"timestamp": k, "prompt_tokens": 5, "completion_tokens": 6, "x": "y"} for k in (1, 3)]
    trace = load_trace(file("\n".join(map(json.dumps, rows))))
    assert trace.times_s.tolist() == [0.0, 2.0]


def test_limits_of_requests_are_read_too(file):
    text = "timestamp,prompt_tokens,completion_tokens,ttft_slo_ms\n1,5,6,250\n2,5,6,\n"
    (limits_s,) = load_trace(file(text)).slo_s.values()
    assert limits_s.tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            "timestamp,prompt_tokens,input_tokens,output_tokens",
            "columns 'prompt_tokens' and 'input_tokens' could both be input_tokens",
        ),
        ("timestamp,ts,isl,osl", "columns 'timestamp' and 'ts' could both be time"),
    ],
)
def test_two_columns_of_one_quantity_are_an_error_that_names_both(file, header, words):
    with pytest.raises(TraceFileError, match=words):
        load_trace(file(f"{header}\n1,2,3,4\n"))


@pytest.mark.parametrize(
    ("first", "unit"),
    [("1700000000000", "ms"), ("1700000000000000", "us"), ("1700000000000000000", "ns")],
)
def test_numbers_that_cannot_be_seconds_ask_for_their_unit(file, first, unit):
    with pytest.raises(TraceFileError, match=f"unit: {unit}"):
        load_trace(file(f"timestamp,prompt_tokens,completion_tokens\n{first},5,6\n"))


def test_seconds_since_1970_are_seconds(file):
    text = "timestamp,prompt_tokens,completion_tokens\n1700000000.25,5,6\n1700000001,5,6\n"
    assert load_trace(file(text)).times_s.tolist() == [0.0, 0.75]


def test_a_missing_quantity_is_still_named(file):
    with pytest.raises(TraceFileError, match="match no known format"):
        load_trace(file("timestamp,prompt_tokens\n1,2\n"))


def test_no_name_means_two_things():
    names = [name for key in SYNONYMS for name in SYNONYMS[key]]
    assert len(names) == len(set(names))
