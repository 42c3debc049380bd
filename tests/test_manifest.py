"""manifest.json: written and read as one type."""

import hashlib
import json

import pytest

from loadgen.archive import store
from loadgen.errors import RunInvalid
from loadgen.manifest.sections import (
    SCHEMA,
    Manifest,
    read_manifest,
)
from tests.runs import MANIFEST


def test_a_manifest_reads_back_as_it_was_written():
    content = json.loads(json.dumps(MANIFEST.to_json()))
    assert content["schema"] == SCHEMA == 3
    assert read_manifest(content, "manifest.json") == MANIFEST


def test_keys_that_do_not_apply_to_a_run_are_not_written():
    content = MANIFEST.to_json()
    assert not {"engine", "workers", "live", "scrapes", "n_bad_messages"} & set(content)
    assert content["server_ended_s"] is None


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


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("seed", "seven", r'manifest\.json: seed: expected int, found "seven"'),
        ("window", {"warmup_s": 2.0, "drain_s": 1.0}, r"window\.measure_s: this key is missing"),
        ("window", {"warmup_s": "2 s"}, r'window\.warmup_s: expected float, found "2 s"'),
        ("ended", "vanished", r'ended: unknown value, found "vanished"'),
        ("preflight", [{"check": 3}], r"preflight\[0\]\.check: expected str, found 3"),
        ("schema", None, r"schema: expected 3, found None"),
        ("schema", 2, r"schema 2 was written by slobench 0\.1\.0; this version reads schema 3"),
        ("schema", 9, r"schema 9 was written by slobench 0\.1\.0"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_value(path, value, message):
    with pytest.raises(RunInvalid, match=message):
        read_manifest({**MANIFEST.to_json(), path: value}, "manifest.json")


def test_a_manifest_reads_like_json_in_a_notebook():
    assert MANIFEST["seed"] == MANIFEST.seed == 7
    assert MANIFEST["target"]["labels"] == {"gpu": "none"}
    assert MANIFEST.get("engine") is None
    assert "engine" not in MANIFEST
    assert isinstance(MANIFEST, Manifest)
    assert dict(MANIFEST) == MANIFEST.to_json()
