"""The policy of docs/engine-lab.md, executed as printed: checked, simulated, compared."""

import re
from pathlib import Path

import pytest

import slobench as sb
from loadgen.cli import exit_codes
from loadgen.cli.app import app
from loadgen.system.plugins import load_plugin

PAGE = (Path(__file__).parent.parent.parent / "docs" / "engine-lab.md").read_text()
CHAPTER = PAGE.split("\n## Write a batching policy\n")[1]
POLICY, CHECK, SIMULATE = re.findall(r"```python\n(.*?)```", CHAPTER, re.DOTALL)


@pytest.fixture
def plugin(tmp_path):
    path = tmp_path / "my_policy.py"
    path.write_text(POLICY)
    load_plugin(path)
    return path


def names(plugin):
    """The names that a notebook has after running the chapter's first block."""
    import sys

    return dict(vars(sys.modules[f"slobench_plugin_{plugin.stem}"]))


def test_the_policy_is_about_forty_lines():
    code = [line for line in POLICY.splitlines() if line.strip()]
    assert len(code) <= 42


def test_the_check_and_the_comparison_print_the_results_of_the_page(plugin, capsys):
    notebook = names(plugin)
    exec(CHECK, notebook)
    printed = capsys.readouterr().out
    assert printed.startswith("short_first: 40 workloads, ")
    assert printed.rstrip().endswith("work conservation, aging")
    quick = SIMULATE.replace("phases.measure=30s", 'phases.measure=10s", "phases.warmup=2s')
    exec(quick, notebook)
    ours, theirs = (
        notebook[name].classes["short"].metrics["ttft_s"] for name in ("ours", "theirs")
    )
    assert ours.percentiles["p99"].value < 0.5 * theirs.percentiles["p99"].value


def test_the_command_line_finds_it(plugin, tmp_path, capsys, monkeypatch):
    words = next(line for line in CHAPTER.splitlines() if "slobench run" in line).split()
    words = [str(plugin) if word == "my_policy.py" else word for word in words[1:]]
    words += ["--out", str(tmp_path / "run"), "--set", "phases.measure=60s"]
    monkeypatch.setattr("sys.argv", ["slobench", *words])
    code = exit_codes.guarded(lambda: app(words), {})
    captured = capsys.readouterr()
    assert code in (0, 1), captured.err
    assert "short_first token_budget=256" in captured.err


def test_the_hardware_file_of_the_page_runs_as_written(tmp_path, monkeypatch):
    (text,) = re.findall(r"```yaml\n(# my_gpu\.yaml\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_gpu.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words = next(line for line in PAGE.splitlines() if "2xmy_gpu.yaml --engine" in line).split()
    words += ["--out", "run", "--set", "phases.measure=2s", "--set", "phases.warmup=0s"]
    assert exit_codes.guarded(lambda: app(words[1:]), {}) in (0, 1, 3)
    run = sb.read_run("run")
    assert run.manifest["target"]["labels"]["gpu"] == "2xmy_gpu.yaml"
    assert "weight_dtype=fp8" in run.manifest["target"]["labels"]["flags"]
    assert sb.summarize(run).throughput.output_tokens_per_s > 0
