"""Exports for spreadsheets and notebooks: no value lost, no digit rounded."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

import slobench
from loadgen.archive import checksums
from loadgen.errors import UsageError
from loadgen.exports.formats import FORMATS, export
from loadgen.manifest.sections import LabelsSection
from loadgen.measure.aggregate import summarize
from loadgen.measure.attainment import derived
from loadgen.measure.wording import csv_cell
from loadgen.records import Names
from tests.runs import (
    changed,
    measured_run,
    replace_schedule,
    two_classes,
    with_manifest,
    write_to,
)
from tests.test_verbs import slobench as command_line


def cell(text):
    """A cell as a reader with full precision decodes it."""
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    try:
        return float(text)
    except ValueError:
        return text


def read(format, content):
    if format == "parquet":
        return pd.read_parquet(io.BytesIO(content))
    if format == "csv":
        rows = csv.DictReader(io.StringIO(content.decode(), newline=""))
        return pd.DataFrame([{name: cell(text) for name, text in row.items()} for row in rows])
    if format == "jsonl":
        return pd.DataFrame([json.loads(line) for line in content.splitlines()])
    return pd.DataFrame(json.loads(content))


@pytest.mark.parametrize("format", ["csv", "json", "jsonl", "parquet"])
def test_a_row_per_run_holds_the_summarys_numbers_to_the_last_digit(format):
    run = measured_run(n_failed=3, slo=["ttft <= 120ms", "attainment >= 99%"])
    summary = summarize(run)
    table = read(format, export(run, format, rows="runs"))
    assert len(table) == 1
    row = table.iloc[0]
    ttft = summary.metrics["ttft_s"]
    assert (row["run"], row["class"], row["verdict"]) == ("evening-chat-1", "all", "missed")
    assert row["ttft_p90_s"] == ttft.percentiles["p90"].value
    assert row["ttft_p90_low_s"] == ttft.percentiles["p90"].low
    assert row["ttft_n"] == ttft.n
    assert row["attainment"] == summary.attainment.value
    assert row["goodput_per_s"] == summary.goodput.requests_per_s.value
    assert row["n_http_error"] == 3
    assert row["slo_missed"] == "attainment >= 99%"
    assert row["label_gpu"] == "none"


@pytest.mark.parametrize("format", ["csv", "json", "jsonl", "parquet"])
def test_a_row_per_request_holds_instants_and_metrics_to_the_last_digit(format):
    run = measured_run(n_failed=3, slo=["ttft <= 120ms"])
    table = read(format, export(run, format, rows="requests"))
    rows, own = run.request_rows, derived(run)
    assert len(table) == len(rows)
    for name in ("released_s", "first_token_s", "done_s"):
        np.testing.assert_array_equal(table[name].astype(float), rows[name])
    for name in ("ttft_s", "tpot_s", "e2e_s", "slo_met"):
        np.testing.assert_array_equal(table[name].astype(float), own[name].astype(float))
    assert set(table["status"]) == {"ok", "http_error"}
    assert list(table["error"].fillna(""))[-1] == "HTTP 503: overloaded"
    assert list(table["is_due"]) == [k >= 20 for k in range(220)]
    assert list(table["is_warmup"]) == [k < 20 for k in range(220)]


@pytest.mark.parametrize("format", ["csv", "json", "jsonl", "parquet"])
def test_a_request_keeps_its_own_slo(format):
    own_s = np.zeros(220)
    own_s[[30, 40]] = 0.25, 1 / 3
    run = replace_schedule(measured_run(), ttft_slo_s=own_s)
    table = read(format, export(run, format, rows="requests"))
    told = table["ttft_slo_s"].astype(float)
    assert {k: told[k] for k in np.flatnonzero(told.notna())} == {30: 0.25, 40: 1 / 3}
    assert table["e2e_slo_s"].isna().all()


def test_several_runs_share_one_table_also_where_their_labels_differ():
    other = with_manifest(
        measured_run(seed=8), run="night-2", target={"labels": LabelsSection(gpus=2)}
    )
    table = read("csv", export([measured_run(), other], "csv"))
    assert list(table["run"]) == ["evening-chat-1", "night-2"]
    assert list(table["label_gpu"].fillna("")) == ["none", ""]
    requests = read("parquet", export([measured_run(), other], "parquet"))
    assert requests.groupby("run").size().to_dict() == {"evening-chat-1": 220, "night-2": 220}
    lines = export([measured_run(), other], "vllm-bench").splitlines()
    assert [json.loads(line)["label"] for line in lines] == ["evening-chat-1", "night-2"]


def test_each_class_has_a_row_of_its_own():
    run = two_classes(chat=["ttft <= 500ms"], rag=["ttft <= 900ms"])
    table = read("json", export(run, "json"))
    assert list(table["class"]) == ["all", "chat", "rag"]
    assert table["n_due"].tolist() == [200, 150, 50]
    assert table["attainment"].tolist()[1:] == [1.0, 0.0]


def test_other_promises_judge_every_format():
    run = two_classes(chat=["ttft <= 1ms"], rag=["ttft <= 1ms"])
    assert read("csv", export(run, "csv", slo=["ttft <= 5s"]))["attainment"].iloc[0] == 1.0
    assert read("jsonl", export(run, "jsonl", slo=["ttft <= 5s"]))["slo_met"].all()
    assert not read("jsonl", export(run, "jsonl"))["slo_met"].any()


def test_text_of_a_server_does_not_break_a_table():
    names = Names(errors=("", 'HTTP 500: "oh, no"\nline 2, ✗'), remotes=("", "127.0.0.1:8000"))
    run = replace(measured_run(n_failed=1), names=names)
    for format in ("csv", "jsonl"):
        table = read(format, export(run, format, rows="requests"))
        assert len(table) == 220
        assert table["error"].iloc[-1] == 'HTTP 500: "oh, no"\nline 2, ✗'


@pytest.mark.parametrize(
    ("format", "rows", "message"),
    [
        ("exel", None, "unknown export format 'exel'"),
        ("csv", "request", "did you mean 'requests'"),
        ("vllm-bench", "runs", "fixed layout"),
    ],
)
def test_invalid_formats_and_rows_are_rejected(format, rows, message):
    with pytest.raises(UsageError, match=message):
        export(measured_run(), format, rows=rows)
    with pytest.raises(UsageError, match="nothing to export"):
        export([], "csv")


def test_a_folder_gets_the_formats_own_file_name(tmp_path):
    for format, chosen in FORMATS.items():
        made = slobench.export(measured_run(n_requests=40), format, tmp_path)
        assert (tmp_path / chosen.file_name).read_bytes() == made


@pytest.fixture
def directory(tmp_path):
    run, path = measured_run(n_requests=60), tmp_path / "run"
    write_to(path, run)
    return path


@pytest.fixture
def cli(capsys, monkeypatch):
    return lambda *words: command_line(capsys, monkeypatch, *words)


def test_the_verb_writes_a_file_and_counts_a_run_named_twice_once(cli, directory, tmp_path):
    (tmp_path / "latest").symlink_to(directory)
    out = tmp_path / "runs.csv"
    words = ["export", directory, tmp_path / "latest", "--format", "csv", "-o", out]
    assert cli(*words) == (0, "", f"export: {out}\n")
    assert len(pd.read_csv(out)) == 1


def test_a_report_can_export_beside_itself(cli, directory, tmp_path):
    named = tmp_path / "named.jsonl"
    code, _, err = cli("report", directory, "--export", "vllm-bench", "--export", f"jsonl={named}")
    assert code == 0
    assert err.splitlines()[-2:] == [
        f"export: {directory / 'vllm-bench.json'}",
        f"export: {named}",
    ]
    assert len(named.read_text().splitlines()) == 60
    assert json.loads((directory / "vllm-bench.json").read_text())["completed"] == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "nowhere", "-f", "csv"], "nowhere: no such run or search here or in runs/"),
        (["report", "nowhere", "--export", "xml"], "--export: unknown export format 'xml'"),
        (
            ["report", "a", "b", "--export", "csv=x.csv"],
            "would overwrite the file",
        ),
        (
            ["run", "quickstart", "--target", "mock", "--export", "csv="],
            "--export csv=: no file",
        ),
        (
            ["run", "quickstart", "--target", "mock", "--export", "csv=no/where.csv"],
            "there is no directory no",
        ),
    ],
)
def test_a_mistake_is_a_line_and_exit_code_2(cli, words, message):
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_runs_own_files_are_not_overwritten(cli, directory):
    before = (directory / "manifest.json").read_bytes()
    code, _, err = cli("export", directory, "-f", "csv", "-o", directory / "manifest.json")
    assert code == 2
    assert "is a file of the run itself" in err
    assert (directory / "manifest.json").read_bytes() == before


def test_the_dashboard_is_written_without_a_run(cli, directory, tmp_path):
    code, out, _ = cli("export", "--format", "grafana")
    assert code == 0
    assert len(json.loads(out)["panels"]) >= 6
    board = tmp_path / "board.json"
    assert cli("export", "-f", "grafana", "-o", board) == (0, "", f"dashboard: {board}\n")
    assert json.loads(board.read_text()) == json.loads(out)
    assert cli("export", directory, "-f", "grafana")[0] == 2


@pytest.mark.faults
@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_csv_neutralises_formulas_and_keeps_numbers(start):
    """The model's name is the server's; a spreadsheet would run it."""
    run = measured_run()
    target = changed(run.manifest.target, model=f"{start}cmd|' /C calc'!A0")
    run = with_manifest(run, target=target)
    (row,) = csv.DictReader(io.StringIO(export(run, "csv").decode(), newline=""))
    assert row["model"] == f"'{start.replace(chr(13), ' ')}cmd|' /C calc'!A0"
    assert float(row["offered_rate_per_s"]) > 0
    assert not [value for value in row.values() if value.startswith(start)]


@pytest.mark.faults
def test_a_negative_number_is_no_formula():
    assert [csv_cell(value) for value in (-1.5, -2, None, "-2", "a=b")] == [
        -1.5, -2, None, "'-2", "a=b"
    ]  # fmt: skip


@pytest.mark.faults
def test_an_export_into_a_run_directory_is_added_to_its_checksums(tmp_path):
    write_to(tmp_path / "run", measured_run())
    run = slobench.read_run(tmp_path / "run")
    for _ in range(2):  # the second replaces a file that is listed
        slobench.export(run, "csv", tmp_path / "run")
        run = replace(run, manifest=structs.replace(run.manifest, slo=("ttft <= 1ms",)))
    assert "export.csv" in (checksums.read(tmp_path / "run") or {})
    assert checksums.problems(tmp_path / "run") == []
    slobench.export(run, "csv", tmp_path / "outside.csv")
    assert not (tmp_path / checksums.NAME).exists()
