"""Promises that the rows of a trace bring themselves, from the file into the schedule."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.archive.store import read_run
from loadgen.errors import ScenarioError, TraceFileError
from loadgen.records import OWN_SLO, schedule_sha256
from loadgen.workload.preview import preview
from loadgen.workload.scenario import load_scenario
from loadgen.workload.schedule import make_plan, make_schedule, split
from loadgen.workload.traces.file import load_trace
from loadgen.workload.traces.trace import TRACES
from tests.runs import measured_run, replace_schedule, write_to

CSV = """\
when,in,out,first,gap,whole
0.0,10,4,250,,
2.5,10,4,,20,1500.5
1.0,10,4,,,
3.0,10,0,999,999,999
4.2,10,4,0,12.5,
"""
FORMAT = {
    "kind": "columns",
    "time": "when",
    "input_tokens": "in",
    "output_tokens": "out",
    "ttft_slo": "first",
    "tpot_slo": "gap",
    "e2e_slo": "whole",
}


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "asked.csv"
    path.write_text(CSV)
    return path


def scenario(path, *more, slo=(), **changes):
    arrivals = {"kind": "trace", "path": str(path), "format": {**FORMAT, **changes}}
    settings = [f"arrivals={json.dumps(arrivals)}", f"slo={json.dumps(list(slo))}", *more]
    text = "schema: 1\nphases: {warmup: 0s, measure: 10s}\narrivals: {kind: poisson, rate: 1/s}\n"
    path.with_suffix(".yaml").write_text(text + "requests: {input_tokens: 1, output_tokens: 1}\n")
    return load_scenario(path.with_suffix(".yaml"), ["requests=null", *settings])


def test_limits_follow_their_rows_through_sorting_and_leaving_out(trace):
    found = load_trace(trace, TRACES.build(FORMAT))
    assert found.times_s.tolist() == [0.0, 1.0, 2.5, 4.2]
    assert found.slo_s["ttft_slo_s"].tolist() == [0.25, 0.0, 0.0, 0.0]
    assert found.slo_s["tpot_slo_s"].tolist() == [0.0, 0.0, 0.02, 0.0125]
    assert found.slo_s["e2e_slo_s"].tolist() == [0.0, 0.0, 1.5005, 0.0]


def test_json_lines_say_the_same_and_null_is_no_promise(tmp_path):
    path = tmp_path / "asked.jsonl"
    rows = [{"when": k, "in": 5, "out": 5, "first": first} for k, first in enumerate((0.3, None))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = {k: v for k, v in FORMAT.items() if k not in ("tpot_slo", "e2e_slo")}
    found = load_trace(path, TRACES.build({**wanted, "slo_unit": "s"}))
    assert {name: limits.tolist() for name, limits in found.slo_s.items()} == {
        "ttft_slo_s": [0.3, 0.0]
    }


@pytest.mark.parametrize("bad", ["-1", "soon", "1e9", "nan"])
def test_a_limit_that_is_none_is_refused_with_its_line(trace, bad):
    trace.write_text(CSV.replace("1500.5", bad))
    with pytest.raises(TraceFileError, match=rf"asked\.csv:3: whole: expected ms.*{bad}"):
        load_trace(trace, TRACES.build(FORMAT))


def test_a_column_that_is_not_there_is_named(trace):
    with pytest.raises(TraceFileError, match="no column 'frst'; did you mean 'first'"):
        load_trace(trace, TRACES.build({**FORMAT, "ttft_slo": "frst"}))


OWN_MS: list[dict[str, Any]] = [{"ttft_slo_ms": 250}, {"ttft_slo_ms": None, "tpot_slo_ms": 12.5}]
MOONCAKE = {"input_length": 10, "output_length": 4, "hash_ids": []}
BAILIAN = {"input_length": 10, "output_length": 4, "chat_id": 0, "parent_chat_id": -1}
OWN_WORDS = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens,tpot_slo_ms,ttft_slo_ms\n"
    "2024-05-12 00:00:00+00:00,10,4,,250\n2024-05-12 00:00:01+00:00,10,4,12.5,\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type,ttft_slo_ms,"
    "tpot_slo_ms\n5,GPT-4,10,4,14,API log,250,\n6,GPT-4,10,4,14,API log,0,12.5\n",
    "mooncake": "".join(
        json.dumps({"timestamp": 1000 * k, **MOONCAKE, **own}) + "\n"
        for k, own in enumerate(OWN_MS)
    ),
    "bailian": "".join(
        json.dumps({**BAILIAN, "timestamp": k, "chat_id": k, **own}) + "\n"
        for k, own in enumerate(OWN_MS)
    ),
}


@pytest.mark.parametrize("kind", OWN_WORDS)
def test_every_format_reads_promises_where_a_file_has_them(tmp_path, kind):
    path = tmp_path / "asked"
    path.write_text(OWN_WORDS[kind])
    found = load_trace(path)
    assert found.format == kind
    assert {name: limits.tolist() for name, limits in found.slo_s.items()} == {
        "ttft_slo_s": [0.25, 0.0],
        "tpot_slo_s": [0.0, 0.0125],
    }


def test_a_format_without_named_columns_may_bring_what_attainment_counts(tmp_path):
    path = tmp_path / "asked.csv"
    path.write_text(OWN_WORDS["azure"])
    settings = [
        f"arrivals={json.dumps({'kind': 'trace', 'path': str(path)})}",
        "requests=null",
        "phases.warmup=0s",
    ]
    made = load_scenario("quickstart", [*settings, 'slo=["attainment >= 95%"]'])
    assert make_schedule(made)["ttft_slo_s"].tolist() == [0.25, 0.0]
    path.write_text(OWN_WORDS["azure"].replace("slo", "other"))
    with pytest.raises(ScenarioError, match=r"add one, e\.g\. 'ttft <= 500ms'"):
        load_scenario("quickstart", [*settings, 'slo=["attainment >= 95%"]'])


@pytest.mark.parametrize(("kind", "bad"), [("mooncake", "-1"), ("bailian", "1e9")])
def test_a_key_that_is_no_limit_is_refused_with_its_line(tmp_path, kind, bad):
    path = tmp_path / "asked.jsonl"
    path.write_text(OWN_WORDS[kind].replace("12.5", bad))
    with pytest.raises(TraceFileError, match=r"asked\.jsonl:2: tpot_slo_ms: expected ms, from 0"):
        load_trace(path)


def test_they_reach_the_schedule_and_its_fingerprint(trace):
    rows = make_schedule(scenario(trace))
    assert rows["ttft_slo_s"].tolist() == [0.25, 0.0, 0.0, 0.0]
    assert rows["tpot_slo_s"].tolist() == [0.0, 0.0, 0.02, 0.0125]
    without = make_schedule(scenario(trace, ttft_slo=None, tpot_slo=None, e2e_slo=None))
    assert schedule_sha256(rows) != schedule_sha256(without)
    for name in OWN_SLO.values():
        assert not without[name].any()
        rows[name] = 0.0
    assert schedule_sha256(rows) == schedule_sha256(without)


@given(
    st.lists(st.none() | st.floats(0.001, 10_000, allow_subnormal=False), min_size=2, max_size=30),
    st.integers(1, 4),
)
@settings(deadline=None, max_examples=25)
def test_every_row_keeps_its_own_limit_however_it_is_cut_and_dealt_out(tmp_path_factory, ms, n):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    lines = [f"{k},{k + 1},1,{'' if one is None else one}" for k, one in enumerate(ms)]
    path.write_text("when,in,out,first\n" + "\n".join(lines) + "\n")
    made = scenario(
        path, "arrivals.loop=true", "arrivals.time_scale=0.5", tpot_slo=None, e2e_slo=None
    )
    for part in split(make_schedule(made), n):
        for row in part:  # a row's input tokens tell which line it was
            asked_ms = ms[int(row["input_tokens"]) - 1]
            assert row["ttft_slo_s"] == pytest.approx((asked_ms or 0.0) / 1e3, rel=1e-12)


def test_attainment_may_be_promised_where_the_rows_say_of_what(trace):
    assert scenario(trace, slo=["attainment >= 95%"]).own_slo_metrics() == (
        "ttft_s",
        "tpot_s",
        "e2e_s",
    )
    with pytest.raises(ScenarioError, match=r"add one, e\.g\. 'ttft <= 500ms'"):
        scenario(trace, slo=["attainment >= 95%"], ttft_slo=None, tpot_slo=None, e2e_slo=None)


def test_the_preview_says_how_many_and_how_strict(trace):
    plan = make_plan(made := scenario(trace))
    assert preview(made, *plan)["own_slo"] == [
        {"text": "ttft <= the request's own", "n": 1, "min_s": 0.25, "p50_s": 0.25, "max_s": 0.25},
        {"text": "tpot <= the request's own", "n": 2, "min_s": 0.0125, "p50_s": 0.0125,
         "max_s": 0.02},
        {"text": "e2e <= the request's own", "n": 1, "min_s": 1.5005, "p50_s": 1.5005,
         "max_s": 1.5005},
    ]  # fmt: skip


def test_a_recorded_run_keeps_them_exactly(tmp_path):
    run = measured_run()
    limits_s = np.random.default_rng(3).lognormal(0, 1, len(run.schedule_rows))
    run = replace_schedule(run, ttft_slo_s=limits_s)
    write_to(tmp_path, run, {})
    read = read_run(tmp_path)
    assert read.schedule_rows["ttft_slo_s"].tolist() == limits_s.tolist()
    assert "ttft_slo_s" in read.schedule
