"""manifest.json: written and read as one type; files of the version before are still read."""

import hashlib
import json
from dataclasses import replace

import pytest

from loadgen.archive import checksums, store
from loadgen.errors import RunInvalid
from loadgen.manifest.sections import (
    SCHEMA,
    Manifest,
    read_client_report,
    read_manifest,
    text_sha256,
)
from loadgen.manifest.self_report import ClientReport
from loadgen.studies.compare.comparable import changes, refusal
from tests.runs import MANIFEST, SHARD, changed, measured_run, write_to

TEXT = "schema: 1\nname: quickstart\n"


def schema_1():
    """manifest.json as the version before schema 2 wrote it."""
    return {
        "schema": 1,
        "run": "evening-chat-1",
        "slobench": "0.1.0",
        "command": ["slobench", "run", "scenarios/quickstart.yaml", "--target", "mock"],
        "scenario": {
            "name": "quickstart",
            "text": TEXT,
            "resolved": {
                "name": "quickstart",
                "limits": {"max_concurrency": None, "when_full": "drop"},
                "arrivals": {"kind": "poisson", "rate": "10/s"},
            },
        },
        "seed": 7,
        "salt": "b2c4",
        "schedule_sha256": "ab" * 32,
        "n_requests": 220,
        "slo": ["ttft <= 500ms"],
        "classes": {
            "default": {"slo": [], "priority": 0, "tenant": "default", "is_closed_loop": False}
        },
        "target": {
            "kind": "mock",
            "url": "http://127.0.0.1:8000",
            "api": "chat",
            "model": "tiny-llama",
            "api_key_env": None,
            "extra_body": {},
            "connections": "reuse",
            "headers": [],
            "labels": {"engine": "mock", "flags": ""},
            "ignore_eos": True,
            "prompt_fit": [8.0, 0.25],
            "metrics": [],
            "prompt_words": 0,
        },
        "preflight": [{"check": "reachable", "ok": True, "detail": "connected in 3 ms"}],
        "names": {"classes": ["default"], "tenants": ["default"]},
        "window": {"warmup_s": 2.0, "measure_s": 20.0, "drain_s": 10.0},
        "instrument_limits": {
            "lateness_s": None,
            "loop_lag_s": 0.005,
            "read_backlog_s": 0.0025,
            "cpu_share": 0.9,
            "run_delay_share": 0.01,
        },
        "clock": "CLOCK_MONOTONIC",
        "host": {
            "hostname": "bench-1",
            "cpus": 2,
            "cpu_model": "",
            "platform": "Linux-6.1",
            "python": "3.11.7",
        },
        "versions": {"numpy": "2.1.0"},
        "git": "",
        "started_utc": "2026-01-05T10:00:00+00:00",
        "ended": "completed",
        "end_reason": "",
        "transport": "fast",
        "epoch_monotonic_s": 1000.0,
        "epoch_utc": "2026-01-05T10:00:00+00:00",
        "server_ended_s": None,
        "instrument": {"shards": [SHARD.to_json()], "family_s": 0.5},
    }


@pytest.fixture
def old_directory(tmp_path):
    """A run directory with a manifest of schema 1."""
    run = measured_run(slo=["ttft <= 500ms"])
    write_to(tmp_path, run)
    (tmp_path / checksums.NAME).unlink()
    (tmp_path / "manifest.json").write_text(json.dumps(schema_1()))
    return tmp_path


def test_a_manifest_reads_back_as_it_was_written():
    content = json.loads(json.dumps(MANIFEST.to_json()))
    assert content["schema"] == SCHEMA == 3
    assert read_manifest(content, "manifest.json") == MANIFEST


def test_keys_that_do_not_apply_to_a_run_are_not_written():
    content = MANIFEST.to_json()
    assert not {"engine", "workers", "live", "scrapes", "n_bad_messages"} & set(content)
    assert content["server_ended_s"] is None


def test_schema_1_is_read_without_a_loss():
    manifest = read_manifest(schema_1(), "manifest.json")
    content = manifest.to_json()
    assert content["scenario"].pop("source") == ""
    assert content["scenario"].pop("sha256") == text_sha256(TEXT)
    old = schema_1()
    assert ClientReport((SHARD,), 0.5) == read_client_report(old, "manifest.json")
    del old["instrument"]
    assert content == {**old, "schema": 3}


def test_a_simulated_run_of_schema_1_has_no_server_to_end_and_no_key():
    old = schema_1()
    del old["server_ended_s"], old["epoch_utc"], old["transport"]
    old["target"] = {"kind": "sim", "url": "sim://h100/8b", "model": "8b", "labels": {}}
    manifest = read_manifest(old, "manifest.json")
    assert (manifest.server_ended_s, manifest.target.api_key_env) == (None, None)


def test_readings_that_the_first_clients_did_not_take_are_not_known():
    old = schema_1()
    del old["instrument"]["shards"][0]["stalls"], old["instrument"]["shards"][0]["cores"]
    (shard,) = read_client_report(old, "manifest.json").shards
    assert (shard.stalls, shard.cores) == (None, None)


def test_a_directory_of_schema_1_is_reported_rescored_and_compared(old_directory, cli, tmp_path):
    new = tmp_path / "new"
    manifest = changed(read_manifest(schema_1(), "manifest.json"), run="evening-chat-2")
    run = replace(measured_run(seed=8), manifest=manifest)
    write_to(new, run)
    for words in (["report", old_directory], ["rescore", old_directory, "--slo", "ttft <= 1s"]):
        result = cli(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    page = (old_directory / "report.html").read_text()
    assert text_sha256(TEXT) in page
    result = cli("compare", old_directory, new, "--within-run", "--json", cwd=tmp_path)
    assert result.returncode in (0, 1, 3), result.stderr
    assert json.loads(result.stdout)["measures"]


def test_the_report_of_a_recorded_run_names_its_scenario_by_path_and_hash(cli, tmp_path):
    path = tmp_path / "evening.yaml"
    path.write_text(
        "schema: 1\nname: evening\narrivals: {kind: constant, rate: 10/s}\n"
        "requests: {input_tokens: 50, output_tokens: 8}\nphases: {measure: 2s}\n"
    )
    out = tmp_path / "run"
    words = ["run", path, "--set", "seed=3", "--target", "sim", "--out", out]
    result = cli(*words, cwd=tmp_path)
    assert result.returncode in (0, 1, 3), result.stderr
    scenario = store.read_run(out).manifest.scenario
    assert (scenario.source, scenario.name) == (str(path), "evening")
    assert scenario.sha256 == hashlib.sha256(scenario.text.encode()).hexdigest()
    page = (out / "report.html").read_text()
    assert f"<dt>scenario</dt><dd>{path}</dd>" in page
    assert f"<dt>scenario sha256</dt><dd>{scenario.sha256}</dd>" in page


def test_manifests_of_both_schemas_are_compared_by_the_same_keys():
    old = read_manifest(schema_1(), "manifest.json")
    new = changed(old, scenario={"source": "quickstart.yaml", "sha256": "ab" * 32})
    assert refusal([old], [new]) == []
    assert changes(old, new) == []


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", "seven", r'manifest\.json: seed: expected int, found "seven"'),
        ("window", {"warmup_s": 2.0, "drain_s": 1.0}, r"window\.measure_s: this key is missing"),
        ("window", {"warmup_s": "2 s"}, r'window\.warmup_s: expected float, found "2 s"'),
        ("ended", "vanished", r'ended: unknown value, found "vanished"'),
        ("preflight", [{"check": 3}], r"preflight\[0\]\.check: expected str, found 3"),
        ("schema", None, r"schema: expected 1 to 3, found None"),
        ("schema", 9, r"schema 9 was written by slobench 0\.1\.0"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_value(path, value, message):
    with pytest.raises(RunInvalid, match=message):
        read_manifest({**schema_1(), path: value}, "manifest.json")


def test_a_manifest_reads_like_json_in_a_notebook():
    assert MANIFEST["seed"] == MANIFEST.seed == 7
    assert MANIFEST["target"]["labels"] == {"gpu": "none"}
    assert MANIFEST.get("engine") is None
    assert "engine" not in MANIFEST
    assert isinstance(MANIFEST, Manifest)
    assert dict(MANIFEST) == MANIFEST.to_json()
