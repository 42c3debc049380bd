"""A nightly file says every mistake with file, line and key; and which cells a night has."""

from pathlib import Path

import pytest

from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.nightly.matrix import night_cells
from loadgen.studies.nightly.spec import load_nightly

TEXT = """\
schema: 1
targets: [sim]
scenarios: [nightly_small]
"""


@pytest.fixture
def cells(tmp_path):
    """`cells(text, engine="")`: the cells of a nightly file of this text."""

    def read(text, engine="", environ=None):
        path = tmp_path / "nightly.yaml"
        path.write_text(text)
        options = RunOptions(environ=environ or {})
        return night_cells(load_nightly(path), path, options, engine)

    return read


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scenarios: [chat]\n", ":1: targets: this key is required"),
        (TEXT + "repeat: 3\n", ":4: repeat: unknown key 'repeat'; did you mean 'repeats'?"),
        (TEXT + "repeats: 1\n", ":4: repeats: must be greater than or equal to 2"),
        (TEXT + "metrics: [ttft]\n", ":4: metrics.0: 'ttft': 'ttft' has a value per request; "),
        (TEXT + "margins: {'p9(ttft)': 5}\n", ":4: margins.p9(ttft): 5 is not a share"),
        (TEXT + "margins: {p99(tft): 5%}\n", ":4: margins.p99(tft): "),
        (TEXT + "fail_on: wors\n", ":4: fail_on: must be 'worse' or 'inconclusive'"),
        (TEXT + "keep: 3\n", ":4: keep: 3 nights are fewer than the window of 14"),
        (TEXT + "slo: [ttft < 1s]\n", ":4: slo.0: "),
        ("schema: 1\ntargets: [http://h:1]\nscenarios: [a]\nmodes: [static]\n",
         ":4: modes: needs a target that is a server of slobench"),
        ("schema: 1\ntargets: {}\nscenarios: [a]\n", ":2: targets: "),
        ("schema: 1\ntargets: [sim]\nscenarios: [x/a.yaml, y/a.yaml]\n",
         ":3: scenarios: two values have the name a; name them yourself: {a: x/a.yaml, a2: "
         "y/a.yaml}"),
        ("- 1\n", ":1: expected a mapping of keys, got a list"),
    ],
)  # fmt: skip
def test_each_mistake_is_told_with_its_line(cells, tmp_path, text, message):
    with pytest.raises(UsageError) as refused:
        cells(text)
    assert f"{tmp_path / 'nightly.yaml'}{message}" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("scenarios: [nightly_smal]", "scenarios.nightly_smal: nightly_smal: no such file"),
        ("modes: [chunkd]", "modes.chunkd: unknown batching mode 'chunkd'; did you mean 'chunked'"),
        ("modes: {a: 'chunked:x'}", "modes.a: "),
        ("targets: [gone.yaml]", "targets.gone: "),
    ],
)
def test_what_the_file_names_is_checked_before_anything_runs(cells, change, message):
    key = change.partition(":")[0]
    lines = [line for line in TEXT.splitlines() if not line.startswith(key)]
    with pytest.raises(UsageError) as refused:
        cells("\n".join([*lines, change]))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "first", "second", "folder"),
    [
        ("scenarios: {a: nightly_small, a.control: nightly_small}\n"
         "targets: {h: 'http://h:1'}\ncontrol: reference\n",
         "the control of targets.h with scenarios.a", "targets.h with scenarios.a.control",
         "h_a.control"),
        ("targets: [sim]\nscenarios: [nightly_small]\nmodes: {a: chunked, a.control: static}\n"
         "control: sim\n",
         "the control of targets.sim with scenarios.nightly_small with modes.a",
         "targets.sim with scenarios.nightly_small with modes.a.control",
         "sim_nightly_small_a.control"),
        ("targets: {a: sim, a_b: sim}\nscenarios: {c: nightly_small, b_c: nightly_small}\n",
         "targets.a with scenarios.b_c", "targets.a_b with scenarios.c", "a_b_c_chunked"),
    ],
)  # fmt: skip
def test_two_that_would_share_a_folder_are_refused_by_their_keys(
    cells, tmp_path, change, first, second, folder
):
    with pytest.raises(UsageError) as refused:
        cells("schema: 1\n" + change)
    assert str(refused.value).startswith(
        f"{tmp_path / 'nightly.yaml'}: {first} and {second} have the same folder, {folder}; "
    )


def test_a_night_is_targets_by_scenarios_by_modes(cells, tmp_path):
    (tmp_path / "box.yaml").write_text("url: http://127.0.0.1:1\nlabels: {gpu: h200}\n")
    text = """\
schema: 1
targets: {engine: sim, box: box.yaml}
scenarios: {small: nightly_small, quick: quickstart}
modes: {plain: chunked, tight: 'chunked:token_budget=512'}
engine: shape=8b
"""
    found = cells(text)
    assert [cell.name for cell in found] == [
        "engine_small_plain", "engine_quick_plain", "engine_small_tight", "engine_quick_tight",
        "box_small", "box_quick",
    ]  # fmt: skip
    assert found[2].cell.options.engine == "shape=8b,mode=chunked,token_budget=512"
    assert found[4].cell.options.engine == ""
    assert found[4].cell.target == str(tmp_path / "box.yaml")
    assert len({cell.key for cell in found}) == 6


def key(cells, text, **options):
    (cell,) = cells(text, **options)
    return cell.key


def test_the_key_is_what_must_agree_and_not_what_is_under_test(cells, tmp_path):
    plain = key(cells, TEXT)
    assert key(cells, TEXT + "engine: step_delay=10%\n") == plain
    assert key(cells, TEXT, engine="token_budget=512") == plain
    assert key(cells, TEXT + "repeats: 3\nmetrics: [p90(ttft)]\nslo: [ttft <= 1s]\n") == plain
    assert key(cells, TEXT + "engine: shape=70b\n") != plain
    assert key(cells, TEXT.replace("nightly_small", "quickstart")) != plain
    box = tmp_path / "box.yaml"
    text = TEXT.replace("sim", "box.yaml")
    keys = []
    for labels in ("gpu: h200", "gpu: h100", "gpu: h200, version: '2'", "gpu: h200, gpus: 8"):
        box.write_text(f"url: http://127.0.0.1:1\nlabels: {{{labels}}}\n")
        keys.append(key(cells, text))
    assert keys[0] == keys[2]
    assert len(set(keys)) == 3


def test_settings_of_tonight_need_a_server_of_ours(cells):
    with pytest.raises(UsageError, match="--engine needs a server that slobench starts"):
        cells(TEXT.replace("sim", "http://127.0.0.1:1"), engine="step_delay=10%")


def test_the_shipped_nightly_file_can_be_read():
    path = Path(__file__).parents[3] / "benchmarks" / "nightly" / "nightly.yaml"
    found = night_cells(load_nightly(path), path, RunOptions())
    assert [cell.name for cell in found] == ["reference_steady_chunked"]
