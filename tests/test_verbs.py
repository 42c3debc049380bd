"""The verbs that need no server, as a user meets them: data on stdout, the rest on stderr, and the
exit code."""

import ast
import inspect
import json
import subprocess
import sys
import textwrap
from importlib import import_module
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from loadgen.cli import exit_codes
from loadgen.cli.app import app
from loadgen.cli.lazy_verbs import VERBS, command, docstring

TESTS = Path(__file__).parent
BAD = TESTS / "golden" / "bad_scenarios" / "many_mistakes.yaml"


def slobench(capsys, monkeypatch, *words):
    """(exit code, stdout, stderr) of a command line."""
    monkeypatch.setattr("sys.argv", ["slobench", *map(str, words)])
    code = exit_codes.guarded(lambda: app([str(word) for word in words]), {})
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def run(capsys, monkeypatch):
    return lambda *words: slobench(capsys, monkeypatch, *words)


@pytest.fixture
def trace(tmp_path):
    rows = [f"2024-01-01 00:00:{k * 37 % 600 / 10:09.6f},{100 + k},{10 + k % 7}" for k in range(60)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


def test_validate_says_ok_or_every_mistake_and_exits_2(run):
    code, out, err = run("validate", "quickstart", BAD)
    assert code == 2
    assert out == "quickstart: ok (72 requests)\n"
    assert len(err.splitlines()) == 4
    assert all(line.startswith(f"{BAD}:") for line in err.splitlines())
    assert run("validate", "quickstart") == (0, "quickstart: ok (72 requests)\n", "")


def test_validate_names_the_scenario_whose_trace_is_missing(run):
    code, _, err = run("validate", "azure_replay", "--set", "arrivals.path=nowhere.csv")
    assert code == 2
    assert err.startswith("azure_replay: nowhere.csv: no such file")


def test_validate_prints_the_schema(run):
    code, out, _ = run("validate", "--schema")
    assert code == 0
    assert json.loads(out)["$defs"]["arrivals"]["anyOf"]
    assert run("validate")[0] == 2


def test_fit_prints_a_scenario_and_shows_the_fit_beside_it(run, trace, tmp_path):
    code, out, err = run("fit", trace)
    assert code == 0
    assert out.startswith("# Fitted to trace.csv: 60 requests")
    assert "KS distance" in err
    fitted = tmp_path / "fitted.yaml"
    fitted.write_text(out)
    assert run("validate", fitted)[0] == 0
    facts = json.loads(run("fit", trace, "--json")[1])
    assert facts["n"] == 60
    assert facts["scenario"] == out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "nothing.csv"], "nothing.csv: no such file"),
        (["fit", "x.csv", "--format", "azur"], "--format: unknown trace format 'azur'"),
        (["fit", "x.csv", "--format", "{kind: columns, time: t}"], "this key is required"),
        (["from", "wrk http://localhost"], "no known command"),
        (["preview", "quickstart", "--html", "no/such/folder/x.html"], "cannot be written"),
    ],
)
def test_a_mistake_is_a_line_and_exit_code_2(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_from_prints_the_scenario_and_says_what_is_lost(run):
    line = (
        "vllm bench serve --model m --request-rate 8 --num-prompts 80 --top-p 0.5 --lora-modules x"
    )
    code, out, err = run("from", line)
    assert code == 0
    assert "arrivals: {kind: poisson, rate: 8/s}" in out
    assert "no equivalent: --lora-modules x" in err
    assert "extra_body: {top_p: 0.5}" in err
    assert "slobench run scenario.yaml --target target.yaml --model m" in err
    assert json.loads(run("from", line, "--json")[1])["scenario_yaml"] == out


def test_from_writes_the_scenario_and_the_target_file_and_overwrites_nothing(run, tmp_path):
    words = ["from", "vllm bench serve --request-rate 8 --top-p 0.5", "--to", tmp_path / "new"]
    code, out, err = run(*words)
    assert (code, out) == (0, "")
    assert "slobench run scenario.yaml --target target.yaml" in err
    assert "rate: 8/s" in (tmp_path / "new" / "scenario.yaml").read_text()
    assert "extra_body: {top_p: 0.5}" in (tmp_path / "new" / "target.yaml").read_text()
    code, _, err = run(*words)
    assert code == 2
    assert "scenario.yaml: cannot be written: File exists" in err


def test_init_writes_a_scenario_that_validates(run, tmp_path):
    code, out, _ = run("init", tmp_path)
    assert code == 0
    assert len(out.splitlines()) == 6
    assert run("validate", tmp_path / "slobench" / "chat.yaml")[0] == 0
    assert run("init", tmp_path)[0] == 2


def test_preview_writes_a_page_and_the_schedule(run, tmp_path):
    import pyarrow.parquet as pq

    page, table = tmp_path / "p.html", tmp_path / "s.parquet"
    code, _, err = run("preview", "quickstart", "--html", page, "--parquet", table)
    assert code == 0
    assert f"{page}" in err
    assert page.read_text().startswith("<!doctype html>")
    rows = pq.read_table(table)
    assert rows.num_rows == 72
    assert {"scheduled_s", "input_tokens", "output_tokens", "prefix_id"} <= set(rows.column_names)


def test_preview_says_what_reading_a_trace_left_out(run):
    path = TESTS / "golden" / "traces" / "azure_2024.csv"
    code, _, err = run(
        *("preview", "azure_replay", "--set", f"arrivals.path={path}"),
        *("--warmup", "0s", "--duration", "2s"),
    )
    assert code == 0
    assert f"note: {path}: 1 of 5 rows left out" in err


@pytest.mark.parametrize("verb", ["validate", "fit", "from", "init", "preview"])
def test_help_ends_with_an_example(verb):
    shown = CliRunner().invoke(app, [verb, "--help"]).output
    assert f"Example: slobench {verb}" in shown


def test_a_router_applies_to_replicas_among_the_settings(run, tmp_path):
    words = ["quickstart", "--duration", "2s", "--out", tmp_path / "run", "--router", "jsq"]
    _, _, err = run("simulate", *words, "--engine", "replicas=2")
    assert "2 replicas behind jsq" in err


def test_simulate_is_a_run_against_sim(run, tmp_path):
    words = ["quickstart", "--out", tmp_path / "run", "--json"]
    code, out, err = run("simulate", *words, "--engine", "token_budget=256")
    assert code == 0
    assert "8b on h200, chunked token_budget=256" in err
    assert json.loads(out)["verdict"] == "met"
    code, again, _ = run(
        "run", *words, "--target", "sim", "--engine", "token_budget=256", "--force"
    )
    assert code == 0
    assert json.loads(again)["metrics"] == json.loads(out)["metrics"]
    assert run("simulate", *words, "--force", "--mode", "chunkd")[0] == 2


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """Two sides of three simulated runs each, the second with a mode that makes everybody wait."""
    base = tmp_path_factory.mktemp("runs")
    for mode in ("chunked", "static"):
        for seed in range(3):
            words = ["--mode", mode, "--seed", str(seed), "--out", str(base / mode / str(seed))]
            words += ["--slo", "ttft<=1s", "--slo", "attainment>=95%"]  # static has no TPOT
            shown = CliRunner().invoke(app, ["simulate", "quickstart", *words])
            assert shown.exit_code in (0, 1), shown.output
    return base


def test_compare_tells_which_side_is_worse_and_exits_1(run, simulated, tmp_path):
    before, after = simulated / "chunked", simulated / "static"
    code, out, _ = run("compare", before, after, "--html", tmp_path / "c.html")
    assert code == 1
    assert out.startswith("WORSE: B is worse than A.")
    assert "  changed    target.policy.kind: chunked → static; + 13 more: --full\n" in out
    assert (tmp_path / "c.html").read_text().startswith("<!doctype html>")
    assert run("compare", after, before, "--metric", "p50(ttft)")[0] == 0
    code, out, _ = run("compare", f"{before / '0'},{before / '1'}", before / "2", "--json")
    assert json.loads(out)["pairing"] == "none"


def test_compare_measures_the_noise_of_equal_runs_and_uses_it(run, simulated, tmp_path):
    before = simulated / "chunked"
    assert "sd between runs" in run("compare", "--aa", before)[1]
    code, out, _ = run("compare", "--aa", before, "--json")
    floor = tmp_path / "floor.json"
    floor.write_text(out)
    words = ["compare", before / "0", simulated / "static" / "0", "--noise", floor, "--json"]
    assert code == 0
    assert "noise measured before" in json.loads(run(*words)[1])["measures"][0]["how"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fail-on", "wors"], "--fail-on: unknown verdict 'wors'; did you mean 'worse'?"),
        (["--margin", "five"], "--margin five:"),
        (["--metric", "ttft"], "write 'p50(ttft)'"),
        (["--noise", "nowhere.json"], "--noise nowhere.json: cannot be read"),
        (["third"], "expected two sides A and B"),
    ],
)
def test_compare_says_what_is_wrong(run, words, message):
    code, out, err = run("compare", "a", "b", *words)
    assert (code, out) == (2, "")
    assert message in err


def test_rescore_judges_a_recorded_run_anew_and_leaves_it_alone(run, simulated):
    one = simulated / "chunked" / "0"
    before = {path: path.stat().st_mtime_ns for path in one.iterdir()}
    assert run("rescore", one, "--slo", "ttft<=1ns")[0] == 1
    code, out, _ = run("rescore", one, "--goodput", "ttft:500 tpot:50", "--definition", "all")
    assert code == 0
    assert "ttft_from_send <= 500ms" in out
    assert "TTFT by vllm: first chunk with choices" in out
    facts = json.loads(run("rescore", one, "--definition", "mlperf", "--json")[1])
    assert {row["definition"] for row in facts["definitions"]} == {"slobench", "mlperf"}
    assert {path: path.stat().st_mtime_ns for path in one.iterdir()} == before
    assert "did you mean 'vllm'" in run("rescore", one, "--definition", "vlm")[2]
    assert "write 'max_itl" in run("rescore", one, "--slo", "itl<=5ms")[2]


IN_CLI = sorted(module for module in set(VERBS.values()) if module.startswith("loadgen.cli."))


@pytest.mark.parametrize("module", IN_CLI)
def test_the_body_of_a_verb_has_at_most_60_lines(module):
    """From its docstring to its last statement, without the signature."""
    registered = import_module(module).verbs.registered_commands
    functions = [inspect.unwrap(command.callback) for command in registered]
    assert functions
    for function in functions:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        assert isinstance(tree, ast.FunctionDef)
        n_lines = (tree.end_lineno or 0) - tree.body[0].lineno + 1
        assert n_lines <= 60, f"{function.__name__} in {module}: {n_lines} lines"


@pytest.mark.parametrize("module", sorted(set(VERBS.values())))
def test_every_verb_of_a_module_can_be_named(module):
    declared = import_module(module).verbs.registered_commands
    named = {verb for verb, home in VERBS.items() if home == module}
    assert {verb.name or verb.callback.__name__ for verb in declared} == named


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_page_shows_the_help_of_the_verb_itself(verb):
    assert inspect.cleandoc(docstring(verb)) == inspect.cleandoc(command(verb).help)


def test_a_shell_completes_verbs_with_their_help():
    group = get_command(app)
    items = group.shell_complete(Context(group), "ca")
    assert [(item.value, item.help) for item in items] == [
        ("capacity", "Find the highest load that meets the SLO,..."),
        ("calibrate", "Fit the costs of a server's steps, as a..."),
    ]


def test_an_interrupt_while_it_is_still_importing_is_told_in_one_line():
    code = (
        "import signal, sys\n"
        "from loadgen.cli.main import main\n"
        "class Interrupting:\n"
        "    def find_spec(name, path, target=None):\n"
        "        if name == 'typer':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting)\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "slobench: interrupted\n")
