"""Each key of a point goes to what it belongs to, and everything is checked before a cell runs."""

from __future__ import annotations

import pytest

from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.sweep.axes import read_axis
from loadgen.studies.sweep.points import Base, cells_of
from loadgen.workload.scenario import load_scenario


def cells(*texts, target="sim", how="grid", **options):
    base = Base(load_scenario("quickstart"), target, RunOptions(**options))
    return cells_of(base, [read_axis(text) for text in texts], how)


def test_a_scenario_key_changes_the_scenario_alone():
    found = cells("rate=2/s,8/s")
    assert [c.scenario.resolved()["arrivals"]["rate"] for c in found] == ["2/s", "8/s"]
    assert [c.name for c in found] == ["rate=2_s", "rate=8_s"]
    assert [c.factors for c in found] == [{"arrivals.rate": "2/s"}, {"arrivals.rate": "8/s"}]
    assert {c.server_key for c in found} == {found[0].server_key}
    assert found[0].scenario.seed == found[1].scenario.seed


def test_an_engine_knob_replaces_the_one_that_holds_for_all():
    found = cells("engine.mode=static,chunked", engine="shape=8b,mode=chunked")
    assert [c.options.engine for c in found] == ["shape=8b,mode=static", "shape=8b,mode=chunked"]
    (whole,) = cells("engine='mode=static,max_num_seqs=8'", engine="shape=8b,mode=chunked")
    assert whole.options.engine == "shape=8b,mode=static,max_num_seqs=8"


def test_a_key_of_a_target_file_is_set_on_top_of_it(tmp_path):
    file = tmp_path / "t.yaml"
    file.write_text("launch: {preset: vllm, model: m}\n")
    found = cells("launch.args=--tp 1,--tp 2", "labels.gpus=1,2", target=str(file), how="zip")
    assert [c.options.target_settings for c in found] == [
        ['launch.args="--tp 1"', "labels.gpus=1"],
        ['launch.args="--tp 2"', "labels.gpus=2"],
    ]
    assert found[0].server_key != found[1].server_key


def test_targets_and_models_are_varied_too():
    found = cells("target=http://a:1,http://b:2", "model=x", target="")
    assert [(c.target, c.options.model) for c in found] == [
        ("http://a:1", "x"),
        ("http://b:2", "x"),
    ]


def test_names_are_folders_and_stay_what_they_are_when_values_are_added():
    few = cells("slo=[['ttft <= 1s']]", "requests.input_tokens=64,{kind: fixed, tokens: 9}")
    more = cells(
        "slo=[['ttft <= 1s'], ['ttft <= 2s']]", "requests.input_tokens=64,{kind: fixed, tokens: 9}"
    )
    assert [c.name for c in more[:2]] == [c.name for c in few]
    assert len({c.name for c in more}) == 4
    assert all("/" not in c.name and " " not in c.name for c in more)


def test_keys_are_named_by_their_last_part_unless_two_end_alike():
    (found,) = cells("phases.warmup=1s", "requests.shared_prefix.tokens=5")
    assert found.name == "warmup=1s+tokens=5"
    (found,) = cells("seed=1", "engine.seed=2", target="reference")
    assert found.name == "seed=1+engine.seed=2"


def test_a_long_name_is_cut_and_still_its_own():
    words = ",".join(f"{'w' * 40}{k}" for k in range(3))
    found = cells(*(f"extra_body.{key}={words}" for key in "abc"), target="http://localhost:1")
    assert all(len(cell.name) <= 100 for cell in found)
    assert len({cell.name for cell in found}) == 27


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["arivals.rate=2/s"], "did you mean 'arrivals'"),
        (["name=a"], "no key of a scenario"),
        (["rate=fast"], "--over: arrivals.rate: "),
        (["arrivals.cv=2"], "arrivals.cv"),
        (["engine.mode=chunkd"], "did you mean 'chunked'"),
        (["launch.args=--x"], "--over launch.args: belongs to a target file, and sim has none"),
        (["target=http://a:1", "engine.mode=static"], "set up your own server in its target file"),
        (["target=nowhere.yaml"], "target file nowhere.yaml"),
    ],
)
def test_what_cannot_be_meant_is_told_before_anything_runs(texts, words):
    with pytest.raises(UsageError) as told:
        cells(*texts)
    assert words in str(told.value)


@pytest.mark.parametrize(
    "text",
    [
        "headers.x-team=SECRETA,SECRETB",
        "launch.env.HF_TOKEN=SECRETA,SECRETB",
        "launch.args=[--hf-token, SECRETA],[--hf-token, SECRETB]",
    ],
)
def test_a_secret_is_never_what_varies(text):
    with pytest.raises(UsageError, match="a target file for each value") as told:
        cells(text, target="http://127.0.0.1:9")
    assert "SECRET" not in str(told.value)
