"""A control beside every run, from the file to the verdict: the machine cancels out, a change does
not."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

import slobench as sb
from loadgen.errors import TargetError, UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.order import run_cells
from loadgen.studies.cells.runner import CellFailure
from loadgen.studies.nightly import run as night_module
from loadgen.studies.nightly.matrix import night_cells
from loadgen.studies.nightly.measuring import machine_speed_s
from loadgen.studies.nightly.run import Nightly, NightOptions
from loadgen.studies.nightly.spec import load_nightly
from tests.studies.nightly import few

MORE = """\
engine: shape=./box,hardware=h200
metrics: [p50(tpot)]
"""
BOX = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip


def machine(folder: Path, layers: int) -> None:
    """What both sides run on: so many layers of a model, under a name that stays."""
    (folder / "box").mkdir(exist_ok=True)
    (folder / "box" / "config.json").write_text(json.dumps(BOX | {"num_hidden_layers": layers}))


@pytest.fixture
def nights(tmp_path, monkeypatch, cache):
    """`nights(name, layers, control="sim", engine="")`: a night on a machine of such a pace."""
    monkeypatch.chdir(tmp_path)

    def measure(name, layers, control="sim", resume=False, **options):
        machine(tmp_path, layers)
        few.write(tmp_path, MORE + (f"control: {control}\n" if control else ""))
        asked = Nightly(
            Path("nightly.yaml"), NightOptions(run=RunOptions(cache_dir=cache), **options)
        )
        return asked.run(Console(quiet=True), tmp_path / name, resume=resume)

    return measure


def tpot(night):
    return next(row for row in night.cells[0].measures if row.measure == "p50(tpot)")


def test_a_machine_that_got_slower_is_not_blamed_on_the_server(nights, tmp_path, cache):
    assert nights("first", 32).verdict == "baseline"
    slower = nights("slower", 40)  # 25 % more layers, on both sides
    (cell,) = slower.cells
    assert slower.verdict == "same"
    assert tpot(slower).change == pytest.approx(0, abs=1e-9)
    assert tpot(slower).b / tpot(slower).a == pytest.approx(1.22, abs=0.01)
    assert cell.controls["p50(tpot)"].change == pytest.approx(0.22, abs=0.01)
    # And the same machine with an engine that takes 10 % longer for every step:
    changed = sb.nightly(
        "nightly.yaml", tmp_path / "changed", engine="step_delay=10%", cache_dir=cache
    )
    assert (changed.verdict, changed.exit_code) == ("worse", 1)
    assert tpot(changed).change == pytest.approx(0.10, abs=0.01)
    said = json.loads((tmp_path / "changed" / "nightly.json").read_text())["cells"][0]
    assert said["control"] == {"kind": "sim", "settings": {
        "shape": "./box", "hardware": "h200", "mode": "chunked"}}  # fmt: skip
    first, _, last = said["trends"]["p50(tpot)"]
    assert (first["value"], last["value"]) == (
        pytest.approx(1.0, abs=1e-9), pytest.approx(1.1, abs=0.01))  # fmt: skip
    assert last["control"] / first["control"] == pytest.approx(1.22, abs=0.01)
    for name in ("index.html", "summary.md", "junit.xml"):
        text = (tmp_path / "changed" / name).read_text()
        assert "All changes above are relative to the control, which changed by: p50" in text, name
        assert "worse, against 2 nights, relative to the control" in text or name == "summary.md"
    assert "% of the control" in (tmp_path / "changed" / "index.html").read_text(), "its figures"
    for run in said["runs"]:
        assert (tmp_path / "changed" / run["control_directory"] / "report.html").exists()
    # Accepted and measured again it is the level; with another control it begins a new baseline.
    assert Nightly(Path("nightly.yaml"), NightOptions()).accept(datetime.now().astimezone())
    assert nights("again", 32, engine="step_delay=10%").verdict == "same"


def test_without_a_control_the_machine_gets_the_verdict(nights):
    nights("first", 32, control="")
    assert nights("slower", 40, control="").verdict == "worse"


def test_nights_with_another_control_or_none_are_kept_apart_and_told(nights, tmp_path, cache):
    nights("first", 32)
    few.write(tmp_path, MORE + "control: {target: sim, engine: 'mode=static'}\n")
    console = Console(record=True, width=400)
    asked = Nightly(Path("nightly.yaml"), NightOptions(run=RunOptions(cache_dir=cache)))
    night = asked.run(console, tmp_path / "other")
    assert night.verdict == "baseline"
    said = console.export_text()
    assert "starts a new baseline" in said
    assert "control.settings.mode: 'chunked' → 'static'" in said
    assert nights("none", 32, control="").verdict == "baseline"


@pytest.mark.faults
def test_a_control_that_cannot_start_ends_the_night_at_once(nights, tmp_path):
    with pytest.raises(TargetError) as caught:
        nights("first", 32, control="{target: sim, engine: 'shape=nowhere'}")
    assert str(caught.value).startswith("sim_few_chunked.control: shape: 'nowhere' is neither ")
    assert "the night ends here" in str(caught.value)
    assert len(list(tmp_path.glob("first/*/r*/report.html"))) <= 1, "two repeats were planned"
    assert not (tmp_path / "baseline").exists()


def test_a_run_whose_control_failed_later_is_left_out_with_the_reason(nights, monkeypatch):
    def failing(*args, **options):
        for result in run_cells(*args, **options):
            is_second = result.cell.name.endswith(".control") and result.repeat == 2
            yield CellFailure(result.cell, 2, "no answer") if is_second else result

    monkeypatch.setattr(night_module, "run_cells", failing)
    night = nights("first", 32)
    assert night.verdict == "baseline"
    assert "its control could not be measured: no answer" in night.cells[0].notes[0]


def test_an_interrupted_pair_is_measured_again_as_a_pair(nights, tmp_path, monkeypatch):
    def interrupted(*args, **options):
        running = run_cells(*args, **options)
        yield from (next(running) for _ in range(3))  # a pair and a half
        raise KeyboardInterrupt

    monkeypatch.setattr(night_module, "run_cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nights("out", 32)
    made = {p.parent: p.stat().st_mtime_ns for p in tmp_path.glob("out/*/r*/manifest.json")}
    assert sorted(str(p.relative_to(tmp_path / "out")) for p in made) == [
        "sim_few_chunked.control/r1", "sim_few_chunked/r1", "sim_few_chunked/r2",
    ]  # fmt: skip
    monkeypatch.setattr(night_module, "run_cells", run_cells)
    assert nights("out", 32, resume=True).verdict == "baseline"
    again = {path: (path / "manifest.json").stat().st_mtime_ns != at for path, at in made.items()}
    assert {path.name: new for path, new in again.items()} == {"r1": False, "r2": True}


def cells_of(folder, text, engine="", environ=None):
    (folder / "nightly.yaml").write_text(text)
    file = folder / "nightly.yaml"
    return night_cells(load_nightly(file), file, RunOptions(environ=environ or {}), engine)


HEAD = "schema: 1\nscenarios: [nightly_small]\n"


def test_a_control_has_the_cells_settings_but_not_what_is_under_test(tmp_path):
    text = HEAD + (
        "targets: [reference]\nmodes: [chunked, static]\n"
        "engine: shape=10m,step_delay=5%\ncontrol: reference\n"
    )
    found = cells_of(tmp_path, text, engine="token_budget=64")
    controls = [cell.control.options.engine for cell in found]
    assert controls == ["shape=10m,mode=chunked", "shape=10m,mode=static"]
    assert "token_budget=64" in found[0].cell.options.engine
    assert [cell.control.name for cell in found] == [
        "reference_nightly_small_chunked.control", "reference_nightly_small_static.control",
    ]  # fmt: skip
    one = found[0]
    assert one.cell.server_key != one.control.server_key, "a server of its own, settings alike too"
    text = text.replace("control: reference", "control: {target: reference, engine: mode=static}")
    assert [cell.control.options.engine for cell in cells_of(tmp_path, text)] == [
        "shape=10m,mode=static"] * 2  # fmt: skip


@pytest.mark.parametrize(
    ("target", "engine", "control", "is_together"),
    [
        ("reference", "", "reference", True),
        ("reference", "device=cpu", "{target: reference, engine: 'mode=static'}", True),
        ("reference", "", "mock", True),
        ("reference", "device=cuda", "reference", False),
        ("reference", "port=8123", "reference", False),
        ("reference", "port=8123", "{target: reference, engine: port=8124}", True),
        ("mock", "unix=/tmp/mock.sock", "mock", False),
        ("reference", "", "{target: reference, engine: 'device=cuda'}", False),
        ("reference", "", "{target: reference, servers: in_turns}", False),
        ("reference", "device=cuda", "{target: reference, servers: together}", True),
        ("sim", "", "sim", False),
        ("http://127.0.0.1:1", "", "mock", False),
    ],
)
def test_two_servers_of_ours_on_the_cpu_are_up_together(
    tmp_path, target, engine, control, is_together
):
    text = f"schema: 1\ntargets: ['{target}']\nscenarios: [nightly_small]\n"
    text += f"control: {control}\n" + (f"engine: '{engine}'\n" if engine else "")
    (cell,) = cells_of(tmp_path, text)
    assert cell.control.stays_up is is_together
    assert ("servers" in cell.agrees["control"]) is is_together


def test_the_pace_of_the_machine_is_asked_where_no_control_tells_it(tmp_path):
    (tmp_path / "old.yaml").write_text("launch: {preset: reference}\n")
    text = HEAD + "targets: [reference, old.yaml, mock, 'http://127.0.0.1:1']\n"
    asked = [cell.needs_machine_speed for cell in cells_of(tmp_path, text)]
    assert asked == [True, True, False, False]
    assert not any(
        cell.needs_machine_speed for cell in cells_of(tmp_path, text + "control: reference\n")
    )
    assert not any(
        cell.needs_machine_speed for cell in cells_of(tmp_path, HEAD + "targets: [sim]\n")
    )
    assert 0.0005 < machine_speed_s() < 5


def test_the_key_holds_everything_a_control_declares(tmp_path):
    text = HEAD + "targets: ['http://127.0.0.1:1']\ncontrol: old.yaml\n"
    keys = []
    launch = "launch: {preset: reference, model: 10m}\n"
    for file in (
        "url: http://127.0.0.1:2\n",
        "url: http://127.0.0.1:3\n",
        launch,
        launch + "labels: {version: 1.2.0}\n",
        launch.replace("10m", "10m, args: [--mode, static]"),
    ):
        (tmp_path / "old.yaml").write_text(file)
        (cell,) = cells_of(tmp_path, text)
        assert cell.control.target == str(tmp_path / "old.yaml")
        keys.append(cell.key)
    (alone,) = cells_of(tmp_path, text.replace("control: old.yaml\n", ""))
    assert len({*keys, alone.key}) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("targets: [sim]\ncontrol: reference\n", ":4: control: sim runs in virtual time"),
        ("targets: [reference]\ncontrol: sim\n", ":4: control: sim runs in virtual time"),
        ("targets: [mock]\ncontrol: {target: 'http://h:1', engine: a=b}\n",
         ":4: control.engine: needs a server that slobench starts"),
        ("targets: [sim]\ncontrol: {target: sim, servers: together}\n",
         ":4: control.servers: sim has no server"),
        ("targets: [reference]\ncontrol: {engine: a=b}\n", ":4: control.target: this key is"),
        ("targets: [reference]\ncontrol: gone.yaml\n", ": control: target file "),
    ],
)  # fmt: skip
def test_a_control_that_cannot_be_meant_is_refused_by_its_key(tmp_path, text, message):
    with pytest.raises(UsageError) as refused:
        cells_of(tmp_path, HEAD + text)
    assert message in str(refused.value)
