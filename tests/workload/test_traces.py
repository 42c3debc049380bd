"""Trace files: what is read is exactly what stands there, and what cannot be is refused by line."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import TraceFileError
from loadgen.records import FIRST_PIECE
from loadgen.workload.traces.blocks import n_common, share_blocks
from loadgen.workload.traces.file import load_trace
from loadgen.workload.traces.trace import TRACES

SAMPLES = Path(__file__).parent.parent / "golden" / "traces"
SHARED = Path(os.environ.get("SLOBENCH_SHARED", "../shared")) / "traces"

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
LINE = '{"timestamp": 1, "input_length": 5, "output_length": 6}\n'


def sample(name, kind="auto"):
    return load_trace(SAMPLES / name, kind)


@pytest.mark.faults
def test_an_odd_row_that_is_not_utf8_is_refused_with_its_line(monkeypatch):
    """Arrow printed a traceback for each such row, as an exception that it ignored."""
    ignored: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    content = AZURE.encode() + b"2023-11-16 18:15:46.68,374,44\n\xac,1\n"
    with pytest.raises(TraceFileError, match=r"^t\.csv:3: "):
        TRACES.get("azure")().parse(content, "t.csv")
    assert ignored == []


@pytest.fixture
def file(tmp_path):
    def write(content, name="t.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def refused(file):
    """The reason a file is refused for, without the folder in front of its name."""

    def reason(content, kind="auto"):
        path = file(content)
        with pytest.raises(TraceFileError) as caught:
            load_trace(path, kind)
        return str(caught.value).replace(str(path), path.name)

    return reason


# ---------------------------------------------------------------------------------- the formats


def test_azure_2023_keeps_all_seven_digits():
    trace = sample("azure_2023.csv")
    assert trace.format == "azure"
    assert trace.times_s.tolist() == [0.0, 4.314579, 4.541877, 4.710427]
    assert trace.input_tokens.tolist() == [374, 396, 879, 91]
    assert trace.output_tokens.tolist() == [44, 109, 55, 16]
    assert trace.notes == ()


def test_azure_2024_has_zones_missing_fractions_crlf_unsorted_and_empty_answers():
    trace = sample("azure_2024.csv")
    assert trace.times_s.tolist() == [0.0, 0.1, 0.2007, 1.1]
    assert trace.input_tokens.tolist() == [2376, 2399, 76, 1700]
    assert trace.notes == (
        "1 of 5 rows left out: zero input or output tokens (no answer)",
        "1 rows were earlier than the row before; sorted",
    )


def test_azure_2025_counts_the_images_it_cannot_send():
    trace = sample("azure_2025.csv")
    assert trace.times_s.tolist() == [0.0, 0.113351, 0.867317]
    assert trace.input_tokens.tolist() == [1640, 310, 905]
    assert trace.notes == ("2 of 3 requests had images; sent as text only",)


def test_burstgpt_1_has_models_as_classes_and_leaves_failures_out():
    trace = sample("burstgpt_v1.csv")
    assert trace.format == "burstgpt"
    assert trace.times_s.tolist() == [0.0, 40.0, 40.5]
    assert [trace.classes[k] for k in trace.class_ids] == ["ChatGPT", "ChatGPT", "GPT-4"]
    assert trace.notes == ("1 of 4 rows left out: zero input or output tokens (no answer)",)


def test_burstgpt_2_begins_anywhere_and_has_sessions():
    trace = sample("burstgpt_v2.csv")
    assert trace.times_s.tolist() == [0.0, 0.25, 1.5]
    assert trace.session_ids.tolist() == [1, 0, 1]
    assert trace.output_tokens.tolist() == [20, 5, 30]


def test_mooncake_hash_ids_become_shared_prefixes():
    trace = sample("mooncake.jsonl")
    assert trace.format == "mooncake"
    assert trace.times_s.tolist() == [0.0, 1.2, 1.2, 2.7505, 3.0]
    # rows 0 and 4 share three blocks, row 1 two of them, row 2 one; row 3 shares nothing, and
    # a prompt's last token is always its own
    ends = [FIRST_PIECE + k for k in (0, 1, 2)]
    assert trace.prefix_ids.tolist() == [ends[2], ends[1], ends[0], 0, ends[2]]
    assert trace.prefix_tokens.tolist() == [1499, 1024, 512, 0, 1536]
    assert trace.pieces.tolist() == [(0, 512), (ends[0], 512), (ends[1], 512)]
    assert trace.notes == (
        "shared prefixes: an unlimited cache hits 46.2% of the trace's blocks",  # 2 + 1 + 3 of 13
    )


def test_bailian_links_turns_and_reads_blocks_of_16():
    trace = sample("bailian.jsonl")
    assert trace.format == "bailian"
    assert trace.times_s.tolist() == [0.0, 0.5, 3.125, 9.0, 9.5]
    first, other, *rest, lost = trace.session_ids.tolist()
    assert rest == [first, first]
    assert len({first, other, lost}) == 3
    assert [trace.classes[k] for k in trace.class_ids] == [
        "text",
        "search",
        "text",
        "text",
        "search",
    ]
    assert trace.prefix_tokens.tolist() == [32, 0, 64, 64, 0]
    assert "1 rows answer a chat_id that is not in the file; taken as first" in trace.notes


@pytest.mark.parametrize(
    "lines",
    [
        '{"conversations": [{"from": "system", "value": "s"},'
        ' {"from": "human", "value": "abcdefgh"}, {"from": "gpt", "value": "abcd"}]}\n'
        '{"conversations": []}\n',
        '{"model": "m", "conversation": [{"role": "user", "content": "abcdefgh", "toxic": false},'
        ' {"role": "assistant", "content": "abcd"}]}\n\n',
    ],
)
def test_conversations_in_lines_give_lengths(tmp_path, lines):
    path = tmp_path / "chats.jsonl"
    path.write_text(lines)
    trace = load_trace(path)
    assert trace.format == "sharegpt"
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([2], [1])


def test_columns_in_camel_case_are_recognized(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("RequestTime,PromptTokens,CompletionTokens\n1.5,10,20\n2.5,11,21\n")
    trace = load_trace(path)
    assert trace.times_s.tolist() == [0.0, 1.0]
    assert trace.input_tokens.tolist() == [10, 11]
    assert trace.output_tokens.tolist() == [20, 21]
    lines = tmp_path / "log.jsonl"
    lines.write_text('{"arrivalTimeMs": 5, "inputLength": 3, "outputLength": 4}\n')
    assert load_trace(lines).input_tokens.tolist() == [3]


@pytest.mark.parametrize("format", ["auto", "columns"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_like_its_elements_in_lines(tmp_path, format, indent):
    rows = [
        {"timestamp": 1700000000.1234567, "prompt_tokens": 3, "completion_tokens": 4},
        {"timestamp": 1700000001.1234567, "prompt_tokens": 5, "completion_tokens": 6},
    ]
    path = tmp_path / "log.json"
    path.write_text(json.dumps(rows, indent=indent))
    keys = {"time": "timestamp", "input_tokens": "prompt_tokens"}
    keys |= {"kind": "columns", "output_tokens": "completion_tokens"}
    trace = load_trace(path, "auto" if format == "auto" else TRACES.build(keys))
    assert trace.times_s.tolist() == [0.0, 1.0]
    assert trace.input_tokens.tolist() == [3, 5]
    path.write_text("[{]")
    with pytest.raises(TraceFileError, match=r"log\.json: is not a JSON array: "):
        load_trace(path, "mooncake")


def test_sharegpt_gives_lengths_without_times():
    trace = sample("sharegpt.json")
    assert trace.format == "sharegpt"
    assert not trace.has_times
    assert trace.input_tokens.tolist() == [5, 2]  # 17 and 5 characters
    assert trace.output_tokens.tolist() == [8, 1]  # 29 and 3
    by_byte = load_trace(
        SAMPLES / "sharegpt.json", TRACES.build({"kind": "sharegpt", "chars_per_token": 1.0})
    )
    assert by_byte.input_tokens.tolist() == [17, 5]
    assert trace.notes[0] == (
        "2 of 4 conversations have no question with an answer; left out. 2 have more turns than"
        " the first two; those are not read"
    )


def test_any_csv_is_read_by_its_column_names():
    kind = {"kind": "columns", "time": "when", "input_tokens": "prompt"}
    kind |= {"output_tokens": "completion", "class": "app", "separator": ";"}
    trace = load_trace(SAMPLES / "gateway.csv", TRACES.build(kind))
    # a float64 of 1.7e9 seconds could not tell the first two apart
    assert trace.times_s.tolist() == [0.0, 1e-7, 0.8765433]
    assert trace.input_tokens.tolist() == [100, 200, 300]
    assert trace.classes == ("search", "chat")
    assert trace.class_ids.tolist() == [0, 1, 0]


@pytest.mark.parametrize(("written", "shown"), [(";", ";"), ("\t", "\\t"), ("|", "|")])
def test_another_separator_is_named(file, written, shown):
    lines = [["when", "prompt", "completion"], ["0.0", "1", "2"], ["1.0", "3", "4"]]
    path = file("\n".join(written.join(cells) for cells in lines) + "\n")
    kind = {"kind": "columns", "time": "when", "input_tokens": "prompt"}
    kind |= {"output_tokens": "completion"}
    with pytest.raises(TraceFileError) as raised:
        load_trace(path, TRACES.build(kind))
    assert f"separated by {written!r}, not ','; set separator: \"{shown}\"" in str(raised.value)
    assert load_trace(path, TRACES.build(kind | {"separator": written})).times_s.tolist() == [0, 1]


def test_any_json_lines_are_read_by_their_keys():
    kind = {"kind": "columns", "time": "at", "input_tokens": "in", "output_tokens": "out"}
    trace = load_trace(SAMPLES / "gateway.jsonl", TRACES.build({**kind, "session": "user"}))
    assert trace.times_s.tolist() == [0.0, 0.5, 0.500001]
    assert trace.output_tokens.tolist() == [1, 2, 3]
    assert trace.session_ids.tolist() == [1, 2, 1]


@pytest.mark.parametrize(
    ("unit", "cell", "expected_s"),
    [
        *[
            ("s", "1.5", 0.5),
            ("ms", "1500", 1.499),
            ("us", "2000001", 2.0),
            ("ns", "2000000001", 2.0),
        ],
        *[("s", "1.000000001", 1e-9), ("s", "2.5e0", 1.5), ("s", "1.12345678901234", 0.123456789)],
    ],
)
def test_numeric_times_have_a_unit(file, unit, cell, expected_s):
    kind = TRACES.build(
        {"kind": "columns", "time": "t", "input_tokens": "i", "output_tokens": "o", "unit": unit}
    )
    trace = load_trace(file(f"t,i,o\n1,1,1\n{cell},1,1\n"), kind)
    assert trace.times_s[1] == pytest.approx(expected_s, rel=1e-12)


# ----------------------------------------------------------------------------------- the quirks


@pytest.mark.parametrize(
    "disguise",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: gzip.compress(text),
        lambda text: gzip.compress(b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n")),
        lambda text: gzip.compress(text[:60]) + gzip.compress(text[60:]),
        lambda text: b"\n\n" + text + b"\n  \n\n",
        lambda text: text.rstrip(b"\n"),
        lambda text: text.replace(b",374,", b',"374",').replace(b",44", b", 44 "),
        lambda text: text.replace(b",374,44", b",374.0,4.4e1"),
        lambda text: text.replace(b" 18:15", b"T18:15"),
        lambda text: text.replace(b"\n2023", b"\n\n2023"),
    ],
    ids=[
        *["bom", "crlf", "gzip", "all three", "two gzip members", "blank lines", "no last newline"],
        *["quotes and blanks", "floats", "T", "a blank line between rows"],
    ],
)
def test_the_same_trace_in_another_dress(file, disguise):
    plain = sample("azure_2023.csv")
    dressed = load_trace(file(disguise((SAMPLES / "azure_2023.csv").read_bytes())))
    assert dressed.times_s.tolist() == plain.times_s.tolist()
    assert dressed.input_tokens.tolist() == plain.input_tokens.tolist()
    assert dressed.output_tokens.tolist() == plain.output_tokens.tolist()


@pytest.mark.parametrize(
    ("zone", "shift_s"),
    [("Z", 0), ("+00:00", 0), (" UTC", 0), ("+05:30", -19800), ("-0800", 28800), ("+02", -7200)],
)
def test_zones_are_brought_to_utc(file, zone, shift_s):
    rows = f"2024-01-01 00:00:00Z,1,1\n2024-01-02 00:00:00{zone},1,1\n"
    assert load_trace(file(AZURE + rows)).times_s.tolist() == [0.0, 86400 + shift_s]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "t.csv: is empty"),
        (" \n\n", "t.csv: is empty"),
        (AZURE, "t.csv: has a header and no rows"),
        (
            AZURE + "2023-01-01 00:00:00,1,2\n\n2023-01-01 00:00:01,x,2\n",
            "t.csv:4: ContextTokens: expected a whole number from 0 to 10000000, got 'x'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1.5,2\n",
            "t.csv:2: ContextTokens: expected a whole number from 0 to 10000000, got '1.5'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1,-3\n",
            "t.csv:2: GeneratedTokens: expected a whole number from 0 to 10000000, got '-3'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1,\n",
            "t.csv:2: GeneratedTokens: expected a whole number from 0 to 10000000, got nothing",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1,99999999999999999999\n",
            "t.csv:2: GeneratedTokens: expected a whole number from 0 to 10000000,"
            " got '99999999999999999999'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1,2\r\n2023-01-01 00:00:01,1\r\n",
            "t.csv:3: expected 3 columns, got 2: '2023-01-01 00:00:01,1'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1,2\n16/11/2023 18:15,1,2\n",
            "t.csv:3: TIMESTAMP: expected a date and time like 2024-05-12"
            " 00:00:20.1234567+00:00, got '16/11/2023 18:15'",
        ),
        (
            AZURE + "2023-02-29 00:00:00,1,2\n",
            "t.csv:2: TIMESTAMP: expected a date and time like 2024-05-12"
            " 00:00:20.1234567+00:00, got '2023-02-29 00:00:00'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,1,2\n2023-01-01 00:00:00Z,1,2\n",
            "t.csv:3: TIMESTAMP: expected a zone in every row or in none,"
            " got '2023-01-01 00:00:00Z'",
        ),
        (
            AZURE + "2900-01-01 00:00:00,1,2\n",
            "t.csv:2: TIMESTAMP: expected a date between 1700 and 2250, got '2900-01-01 00:00:00'",
        ),
        (
            AZURE + "2023-01-01 00:00:00,0,2\n2023-01-01 00:00:00,3,0\n",
            "t.csv: none of its 2 rows has both input and output tokens",
        ),
        (
            BURST + "1,GPT-4,1,1,2,API log\nsoon,GPT-4,1,1,2,API log\n",
            "t.csv:3: Timestamp: expected a number, got 'soon'",
        ),
        (BURST + "nan,GPT-4,1,1,2,API log\n", "t.csv:2: Timestamp: expected a number, got 'nan'"),
        (
            BURST + "1e30,GPT-4,1,1,2,API log\n",
            "t.csv:2: Timestamp: expected a time in s, got '1e30'",
        ),
        (LINE + '{"timestamp": 2,\n', "t.csv:2: input data was truncated"),
        (
            LINE + "\n" + LINE.replace("1,", '"2",', 1),
            "t.csv:3: timestamp: expected 'int | float', got 'str'",
        ),
        (LINE + '{"timestamp": 2, "input_length": 5}', "t.csv:2: missing key 'output_length'"),
        (
            LINE.replace("5", "-5"),
            "t.csv:1: input_length: expected a whole number from 0 to 10000000, got -5",
        ),
        (LINE.replace("1", "1e300", 1), "t.csv:1: timestamp: 1e+300 is out of range"),
        ("PK\x03\x04zip", "t.csv: is a zip archive; unpack it first"),
        (
            "version https://git-lfs.github.com/spec/v1\n",
            "t.csv: is a Git LFS pointer, not the file; fetch the file itself",
        ),
        ("\n<!DOCTYPE html><html>", "t.csv: is an HTML page; download the raw file"),
        (
            gzip.compress(AZURE.encode(), mtime=0)[:-9],
            "t.csv: is a damaged gzip file: Compressed file ended before the end-of-stream marker"
            " was reached",
        ),
        (
            "a,b\n1,2\n",
            "t.csv:1: columns a, b match no known format (azure, bailian, burstgpt, columns,"
            " mooncake, sharegpt); name the columns: format: {kind: columns, time: …,"
            " input_tokens: …, output_tokens: …}",
        ),
        (
            AZURE.encode() + b"2023-01-01 00:00:00,1,\xff\n",
            "t.csv:2: is not UTF-8 text (invalid start byte)",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_line_and_reason(refused, content, reason):
    assert refused(content) == reason


def test_a_missing_column_is_named_with_the_nearest(refused):
    kind = TRACES.build(
        {"kind": "columns", "time": "when", "input_tokens": "promt", "output_tokens": "answer"}
    )
    found = refused("when,prompt,answer\n1,2,3\n", kind)
    assert (
        found == "t.csv:1: no column 'promt'; did you mean 'prompt'? (known: answer, prompt, when)"
    )
    assert refused("when,promt,promt,answer\n1,2,2,3\n", kind) == (
        "t.csv:1: the column 'promt' occurs twice"
    )
    assert refused('{"when": 1, "promt": 2, "answer": 3}\n{"when": 1, "answer": 3}\n', kind) == (
        "t.csv:2: no column 'promt'; known: answer, when"
    )


def test_a_file_that_is_not_there_is_told_with_the_place_looked_at(tmp_path):
    with pytest.raises(TraceFileError, match=r"no such file \(looked for /"):
        load_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceFileError, match="did you mean 'azure'"):
        load_trace(SAMPLES / "azure_2023.csv", "azur")


def test_a_chat_id_that_is_there_twice_is_refused(refused):
    line = LINE.replace("{", '{"chat_id": 1, "parent_chat_id": -1, ')
    assert refused(line + "\n" + line) == ("t.csv:3: chat_id: 1 occurs twice, first on line 1")


# ------------------------------------------------------------------------------------- prefixes

hash_lists = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=25)


def common(a, b):
    """Leading elements that two lists share."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def shared(lists, order=None):
    order = np.arange(len(lists)) if order is None else order
    flat = np.array([i for ids in lists for i in ids], np.int64)
    return share_blocks(flat, np.array([len(ids) for ids in lists], np.int64), order)


def path_of(found, k):
    """The pieces of a prompt's shared part, from its start, as (piece, blocks)."""
    path, piece = list[tuple[int, int]](), int(found.piece[k])
    while piece >= 0:
        path.insert(0, (piece, int(found.piece_blocks[piece])))
        piece = int(found.after[piece])
    return path


@given(hash_lists, st.randoms(use_true_random=False))
def test_prompts_share_exactly_the_blocks_that_their_lists_share(lists, random):
    order = np.array(random.sample(range(len(lists)), len(lists)))
    found = shared(lists, order)
    paths = [path_of(found, k) for k in range(len(lists))]
    for a in range(len(lists)):
        others = [common(lists[a], lists[b]) for b in range(len(lists)) if b != a]
        assert found.blocks[a] == max(others, default=0)  # the deepest block shared with anyone
        assert found.blocks[a] == sum(blocks for _, blocks in paths[a])
        for b in range(a):
            same = paths[a][: common(paths[a], paths[b])]
            assert sum(blocks for _, blocks in same) == common(lists[a], lists[b])
    assert np.all(found.after < np.arange(len(found.after)))  # behind the pieces that they follow
    assert np.all(found.piece_blocks > 0)
    assert len(found.after) < 2 * len(lists)


@given(hash_lists, st.randoms(use_true_random=False))
def test_the_stated_cache_hits_are_those_of_an_unlimited_cache(lists, random):
    order = random.sample(range(len(lists)), len(lists))
    found, seen = shared(lists, np.array(order)), set()
    for k in order:
        beginnings = [tuple(lists[k][:n]) for n in range(1, len(lists[k]) + 1)]
        assert found.hits[k] == sum(beginning in seen for beginning in beginnings)
        seen.update(beginnings)


def test_pieces_are_numbered_by_time_whatever_the_hashes_are():
    lists = [[9, 8], [1, 2], [9, 8, 7], [1, 2, 3], [9, 8, 7, 6]]
    for renamed in (lists, [[-(2**62) + 5 * i for i in ids] for ids in lists]):
        found = shared(renamed)
        assert found.piece.tolist() == [0, 1, 2, 1, 2]
        assert found.after.tolist() == [-1, -1, 0]
        assert found.piece_blocks.tolist() == [2, 2, 1]


@given(st.lists(st.integers(0, 1), max_size=400), st.lists(st.integers(0, 1), max_size=9))
def test_long_lists_are_compared_to_the_end(one, other):
    long = np.array(one + other), np.array(one + [1 - bit for bit in other])
    assert n_common(*long) == len(one)


# -------------------------------------------------------------------------------- the real files


def real(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not there (set SLOBENCH_SHARED to the folder that holds traces/)")
    return path


def test_the_real_azure_file():
    trace = load_trace(real("AzureLLMInferenceTrace_code.csv"))
    assert len(trace) == 8819
    assert trace.times_s[:3].tolist() == [0.0, 0.052, 0.098189]
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (4808, 10)
    assert np.all(np.diff(trace.times_s) >= 0)
    assert trace.notes == ()


def test_the_real_mooncake_file():
    trace = load_trace(real("mooncake_synthetic_trace.jsonl"))
    assert len(trace) == 3993
    assert trace.times_s[2] == 0.04
    assert "64.0%" in trace.notes[0]
    assert np.all(trace.prefix_tokens < trace.input_tokens)
