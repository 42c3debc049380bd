"""`slobench demo truth` with slobench itself and a load generator of a few lines."""

import json
import shutil
import sys

import pytest

from loadgen.errors import UsageError
from loadgen.manifest.json_section import read_section
from loadgen.studies.demo import peers, view
from loadgen.studies.demo.peers import PEERS, Peer, read_settings, words
from loadgen.studies.demo.result import Demo, Load
from loadgen.studies.demo.run import DemoSpec
from tests.studies.demo.fake_peer import fake_command
from tests.test_verbs import slobench

QUICK = ["--rounds=1", "--duration=1s", "--rate=20/s", "--output-len=40", "--itl=5ms", "--limit=1s"]


def settings_file(folder, **entries):
    path = folder / "peers.yaml"
    path.write_text(json.dumps(entries))  # JSON is YAML
    return path


@pytest.fixture
def demo(capsys, monkeypatch, truth_cache, page_cache, tmp_path):
    """`demo(*words)`: (exit code, stdout, stderr), with the programs of the session's cache."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache" / "slobench"
    shutil.copytree(truth_cache, cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    return lambda *line: slobench(capsys, monkeypatch, "demo", *line)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The settings of three tools: one that reports the truth, one that reports TTFT 3 s too high,
    and one that fails."""
    return settings_file(
        tmp_path_factory.mktemp("settings"),
        honest={"command": fake_command(), "result": "result.json"},
        late={"command": fake_command("--late", "3"), "result": "result.json"},
        broken={"command": f"{sys.executable} -c 'import nowhere'", "result": "result.json"},
    )


def test_reported_and_true_figures_stand_side_by_side(demo, measured, tmp_path):
    chosen = [f"--peer={name}" for name in ("honest", "late", "broken")]
    code, out, err = demo("truth", f"--peers={measured}", *chosen, *QUICK, "--stall-every=20",
                          "--out=d", "--json")  # fmt: skip
    result = read_section(json.loads(out), Demo, "demo")
    tools = {tool.name: tool for tool in result.tools}
    assert [tools[name].state for name in ("slobench", "honest", "late", "broken")] == [
        "measured", "measured", "measured", "failed",
    ]  # fmt: skip
    assert tools["broken"].reason == (
        "exit status 1: ModuleNotFoundError: No module named 'nowhere'"
    )
    assert err.count("broken failed") == 1  # a tool that failed is not run again
    for name in ("slobench", "honest"):
        (run,) = tools[name].of("steady")
        assert 0.05 <= run.truth.ttft_p50_s < 0.5
        assert 0 <= run.reported.ttft_p50_s - run.truth.ttft_p50_s < 0.5
        assert run.cpu_s > 0
    late = tools["late"].of("steady")[0]
    assert 3 <= late.reported.ttft_p50_s - late.truth.ttft_p50_s < 3.5
    assert late.reported.n == 20
    for name in ("slobench", "honest"):
        (stalling,) = tools[name].of("stalls")
        assert 0.3 <= stalling.truth.longest_gap_s < 1
        assert 0.25 <= stalling.reported.longest_gap_s < 1.5
    is_valid = not any(run.invalid for run in tools["slobench"].observations)
    assert code == result.exit_code == (0 if is_valid else 3), err
    assert view.verdict(tools["late"], result).startswith("p50 3")
    assert json.loads((tmp_path / "d" / "demo.json").read_text()) == json.loads(out)
    page = (tmp_path / "d" / "report.html").read_text()
    assert "fake_peer.py --late 3" in page  # the settings of every tool
    assert "No module named" in page
    lines = "\n".join(view.lines(result))
    assert "vllm bench: not installed: pip install vllm" in lines or shutil.which("vllm")


def test_a_slobench_that_measures_another_server_has_no_result(demo, tmp_path):
    command = (
        "slobench run --target sim --rate {rate}/s --input-len 8 --output-len 4 --warmup 0s "
        "--duration {seconds}s --out {out}/run"
    )
    path = settings_file(tmp_path, slobench={"command": command})
    code, _, err = demo("truth", f"--peers={path}", "--peer=sglang", *QUICK, "--out=d")
    assert code == 3
    assert "slobench failed: request 0 is not in the truth server's log" in err


def test_without_a_compiler_nothing_is_made(demo, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    code, _, err = demo("truth", *QUICK, "--out=d")
    assert code == 2
    assert "the truth server needs a C compiler on this machine" in err
    assert not (tmp_path / "d").exists()


def test_the_settings_are_printed_as_a_file_that_can_be_read(demo, tmp_path):
    code, out, _ = demo("truth", "--settings")
    assert code == 0
    (tmp_path / "copy.yaml").write_text(out)
    assert read_settings(tmp_path / "copy.yaml") == read_settings(None)


def test_a_file_changes_one_setting_and_keeps_the_others(tmp_path):
    path = settings_file(tmp_path, guidellm={"command": "guidellm run --target {url}"})
    changed = read_settings(path)
    assert changed["guidellm"].command == "guidellm run --target {url}"
    assert changed["guidellm"].install == PEERS["guidellm"].install
    assert changed["aiperf"] == PEERS["aiperf"]
    assert list(changed) == ["slobench", *PEERS]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"x": {"command": "x {ur}", "result": "r"}}, r"peers.yaml:1: x.command: .*did you mean"),
        ({"x": {"command": "x"}}, r"peers.yaml:1: x.result: Field required"),
        (
            {"x": {"command": "x", "result": "r", "flags": 1}},
            r"x.flags: unknown key 'flags'; known: command",
        ),
        ({"x": {"command": "", "result": "r"}}, r"x.command: an empty command"),
        ({"x": {"command": "x 'y", "result": "r"}}, r"x.command: No closing quotation"),
        ({"x": 3}, r"x: expected keys: command, result"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, entries, message):
    with pytest.raises(UsageError, match=message):
        read_settings(settings_file(tmp_path, **entries))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["lies"], "demo lies: known: truth"),
        (["truth", "--peer=guidelm"], "--peer guidelm: unknown load generator; did you mean"),
        (["truth", "--stall=0s"], "--stall 0s: expected a time above 0 s"),
        (["truth", "--rate=fast"], "--rate"),
        (["truth", "--tokenizer=nowhere"], "--tokenizer nowhere: is no folder"),
        (["truth", "--peers=nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_a_mistake_is_named(demo, line, message):
    code, _, err = demo(*line)
    assert code == 2
    assert message in err


def test_values_stand_in_place_of_their_names_also_with_blanks():
    line = words("tool 'a b' --out {out}/x --json '{\"k\": 1}'", {"out": "/my runs"})
    assert line == ["tool", "a b", "--out", "/my runs/x", "--json", '{"k": 1}']


def test_without_a_choice_the_first_two_that_are_installed_run(tmp_path, monkeypatch):
    known = {name: Peer(command=f"{name} x", result="r") for name in ("slobench", *"abcd")}
    for name in "bcd":
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    load = Load(1, 1, 1, 1, 2, 0.05, 0.01, 200, 0.3)
    assert DemoSpec(load, 0.0, known).selected() == ["slobench", "b", "c"]
    assert DemoSpec(load, 0.0, known, chosen=("d", "a")).selected() == ["slobench", "d"]


def test_the_version_is_that_of_the_package_next_to_the_program(tmp_path):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "guidellm-0.8.1.dist-info").mkdir(parents=True)
    (packages / "guidellm_extras-2.0.dist-info").mkdir()
    program = tmp_path / "bin" / "guidellm"
    program.parent.mkdir()
    program.touch()
    assert peers.version_of(PEERS["guidellm"], program) == "0.8.1"
    assert peers.version_of(PEERS["aiperf"], program) == ""
