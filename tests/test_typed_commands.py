"""Command lines as users of vllm bench, guidellm, k6 and Locust type them: each does what it means,
or its error names what to write."""

import re
from typing import Any

import pytest
from rich.text import Text
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.cli.completion import families, scenarios, settings, slos, targets
from loadgen.cli.lazy_verbs import VERBS, command
from loadgen.cli.peer_flags import HINT_OF, HINTS
from loadgen.errors import UsageError
from loadgen.yaml_document import parse_document

T = "--target http://localhost:8000 "
L = "--input-len 512 --output-len 128 "
R = f"run {T}{L}--duration 60 "

DOES: dict[str, dict[str, Any]] = {  # the line → values of its scenario, by dotted path
    R + "--rate 8": {"arrivals.kind": "poisson", "arrivals.rate": "8/s", "phases.measure": "1m"},
    R + "--rate 8/s": {"arrivals.rate": "8/s"},
    R + "--rate=0.5": {"arrivals.rate": "0.5/s"},
    R + "--rate 30/min": {"arrivals.rate": "0.5/s"},
    R + "--rate '8 req/s'": {"arrivals.rate": "8/s"},
    R + "--concurrency 32": {"arrivals.kind": "users", "arrivals.users": 32},
    R + "--users 32": {"arrivals.kind": "users", "arrivals.users": 32},
    R + "-u 32 --think 2s": {"arrivals.users": 32, "arrivals.think.duration": "2s"},
    R + "--users 32 --think 2": {"arrivals.think.duration": "2s"},
    R + "--rate 8 --max-concurrency 200": {"limits.max_concurrency": 200},
    R + "--rate 8 --warmup 10": {"phases.warmup": "10s"},
    R + "--rate 8 --seed 42": {"seed": 42},
    R + "--rate 8 --slo 'p99(ttft)<500ms'": {"slo.0": "p99(ttft) <= 500ms"},
    R + "--rate 8 --slo 'p99(ttft)<=500ms' --slo 'error_rate<1%'": {"slo.1": "error_rate <= 1%"},
    R + "--rate 8 --slo chat": {"slo.0": "p99(ttft) <= 200ms"},
    R + "--rate 8 --goodput 'ttft:500 tpot:50'": {"slo.1": "tpot <= 50ms"},
    R + "--rate 8 --confidence 95%": {},
    R + "--rate 8 --confidence 95": {},
    R + "--rate 8 --model m": {},
    R + "--rate 8 --set arrivals.kind=constant": {"arrivals.kind": "constant"},
    R + "--rate 8 --set arrivals.kind=gamma --set arrivals.cv=2": {"arrivals.cv": 2},
    f"run {T}{L}--rate 8 --run-time 60s": {"phases.measure": "1m"},
    f"run {T}{L}--users 8 -t 2m": {"phases.measure": "2m"},
    f"run {T}{L}--rate 8 --max-requests 100": {"phases": {"requests": 100}},
    f"run {T}{L}--users 8 --num-prompts 100 -t 2m": {"phases": {"requests": 100, "at_most": "2m"}},
    f"run {T}{L}--rate 8": {"phases.measure": "20s"},  # at least
    f"run {T}{L}--rate 2": {"phases.measure": "40s"},  # 59 + 2 √59 = 74 requests
    f"run {T}{L}--rate 8 --slo 'p99(ttft)<1s'": {"phases.measure": "45s"},  # 299 + 2 √299
    f"run {T}{L}--rate 8 --slo 'ttft<1s'": {"phases.measure": "45s"},  # by the default share
    f"run {T}{L}--rate 1 --slo 'p99(ttft)<1s'": {"phases.measure": "2m"},  # at most
    f"run {T}{L}--users 8": {"phases.measure": "1m"},
    f"run {T}{L}--rate 8 --set phases.requests=50": {"phases": {"requests": 50}},
    f"run quickstart {T}--request-count 50": {"phases.requests": 50},
    f"run quickstart {T}--rate 3 --duration 30": {"arrivals.rate": "3/s", "phases.measure": "30s"},
    f"run quickstart {T}--concurrency 4": {"arrivals.kind": "users", "arrivals.users": 4},
    f"run closed_loop_users {T}--users 9": {"arrivals.users": 9},
}

NAMES = {  # the line → a part of the error that names what to write
    R + "--request-rate 8": "--rate 8",
    R + "--request-rate inf": "--rate 8",
    R + "--rate inf": "--concurrency N",
    f"run --base-url http://localhost:8000 {L}--rate 8": "--target http",
    f"run --url http://localhost:8000 {L}--rate 8": "--target http",
    f"run --host http://localhost:8000 {L}--users 8": "--target http",
    f"run -H http://localhost:8000 {L}--users 8": "--target http",
    f"run {T}--rate 8 --random-input-len 512 --random-output-len 128": "--input-len 512",
    f"run {T}--rate 8 --data prompt_tokens=256,output_tokens=128": "--output-len 128",
    f"run {T}--rate 8 --isl 512 --osl 128": "--input-len 512",
    f"run {T}{L}--rate 8 --max-seconds 60": "--duration 60s",
    R + "--rate-type poisson --rate 8": "sweep",
    R + "--profile kind=sweep": "sweep",
    R + "--rate 8 --burstiness 0.5": "arrivals.cv=1.4",
    R + "--vus 10": "--users 32",
    f"run {T}{L}--vus 10 --iterations 100": "--users 32",
    f"run {T}{L}--users 10 --iterations 100": "--num-prompts 500",
    f"run {T}{L}--rate 8 -d 30s": "--duration 60s",
    R + "--stage 30s:10": "kind: steps",
    R + "--rps 10": "--rate 8",
    R + "--users 32 --spawn-rate 4": "arrivals.ramp_up=8s",
    R + "-u 32 -r 4": "arrivals.ramp_up=8s",
    R + "--users 8 --headless": "slobench web has",
    R + "--users 8 --csv prefix": "--export csv",
    R + "--users 8 --html page.html": "report.html",
    R + "--users 8 --processes 4": "--workers 4",
    R + "--users 8 -f locustfile.py": "slobench run FILE",
    R + "--rate 8 --backend openai-chat": "api: chat",
    R + "--rate 8 --endpoint /v1/completions": "api: chat, completions, responses",
    R + "--rate 8 --dataset-name random": "--input-len 512",
    R + "--rate 8 --dataset-path sharegpt.json": "write --dataset FILE",
    R + "--rate 8 --ignore-eos": "leave it out",
    R + "--rate 8 --percentile-metrics ttft,tpot": "every run has all",
    R + "--rate 8 --save-result": "--out DIR",
    R + "--rate 8 --result-filename r.json": "--export vllm-bench",
    R + "--rate 8 --tokenizer meta-llama/Llama-3.1-8B": "no tokenizer is needed",
    R + "--rate 8 --output-path out.json": "--out DIR",
    R + "--rate 8 --warmup-percent 0.1": "--warmup 10s",
    R + "--rate 8 --temperature 0": "requests.temperature",
    R + "--rate 8 --extra-body '{}'": "extra_body of a target file",
    R + "--rate 8 --api-key secret": "OPENAI_API_KEY",
    R + "--rate 8 --threshold 'p(99)<500'": "--slo",
    R + "--rate 8 --slo 'p(99)<500ms'": "did you mean",
    R + "--rate 8 --slo 'p99 ttft<500ms'": "'p99(ttft)'",
    R + "--rate 8 --slo 'ttft<500'": "'500ms'",
    R + "--rate 8 --concurrency 32": "use one",
    R + "--rate 8req": "write e.g. '12/s'",
    f"run {T}--rate 8": "--input-len, --output-len",
    f"run {L}--rate 8 --duration 60": "--target URL",
    "run localhost:8000": "write --target http://localhost:8000",
    "run http://localhost:8000/v1": "write --target http://localhost:8000/v1",
    "https://llm.example": "write slobench run --target https://llm.example",
    R + "-t2 -c10 -d30s": "--concurrency 32",
    R + "-d30s -c 10": "--duration 60s",
    R + "-z 30s -q 10": "--duration 60s",
    R + "-c 4 -q 10": "--concurrency 32",
    R + "-q 10": "--rate 8",
    R + "-R 100": "--rate 8",
    R + "--rate 8 --time 30s": "--duration 60s",
    R + "--rate 8 --streaming": "leave it out",
    R + "--rate 8 --insecure": "--ca-cert FILE",
    R + "--rate 8 --benchmark-duration 30": "--duration 60s",
    R + "--concurrency 4 --max-error-rate 0.1": "stop_when",
    R + "--rate 1,2,4": "slobench sweep --over rate=1,2,4",
    R + "--concurrency=1,2": "slobench sweep --over concurrency=1,2",
    f"sweep {T}{L}--rate 1,2,4": "; write --over rate=1,2,4",
    f"sweep {T}{L}--rates 1,2,4": "--over rate=2,4,8",
    f"run {T}--input-len 1k --output-len 8 --rate 8": "--input-len 1k: expected a whole number",
    f"run {T}--input-len 256 --output-len=8-64 --rate 8": "requests.output_tokens={kind: uniform",
    R + "--concurrency 1.5": "--concurrency 1.5: expected a whole number",
    R + "--rate 8 --p99-ttft 500ms": "--slo 'p99(ttft)<500ms'",
    R + "--rate 8 --ttft-p95 500ms": "--slo 'p95(ttft)<500ms'",
    R + "--rate 8 -n 100": "--num-prompts",
    R + "--rate 8 -o results": "--out DIR",
    R + "--rate 8 --quiet": "stderr",
    R + "--users 8 --think-time 2s": "--think 2s",
    R + "--rate 8 --arrivals gamma": "arrivals.kind",
    f"capacity {T}{L}--slo ttft<1s --max-seconds 60": "--budget",
    f"compare --baseline a {T}": "--target A --target B",
    "web --port 9000": "--web-port",
    "doctor http://localhost:8000": "slobench doctor --target http://localhost:8000",
    "report": "slobench report runs/latest",
    "size quickstart --hardware h200": "size: --peak is missing; e.g. slobench size",
    "solve quickstart": "solve: --hardware is missing; e.g. slobench solve --rate 1/s",
    "help run": "slobench run --help",
    "version": "slobench --version",
    "bench serve --model m": "slobench run",
    "benchmark --target http://localhost:8000": "slobench run",
    "attack": "slobench run",
    "ui": "slobench web",
    "max": "slobench capacity",
}


def failed(line):
    import shlex

    result = CliRunner().invoke(app, shlex.split(line), env={"OPENAI_BASE_URL": ""})
    return result, str(result.exception or "")


@pytest.mark.parametrize("line", DOES)
def test_a_line_does_what_it_means(line):
    result, _ = failed(f"{line} --print-scenario")
    assert result.exit_code == 0, result.exception
    document = parse_document(result.stdout, line, UsageError)
    for dotted, expected in DOES[line].items():
        value: Any = document.values
        for part in dotted.split("."):
            value = value[int(part)] if part.isdecimal() else value[part]
        assert value == expected, dotted


@pytest.mark.parametrize("line", NAMES)
def test_an_error_names_what_to_write(line):
    result, problem = failed(line)
    assert isinstance(result.exception, UsageError), result.output
    assert NAMES[line] in problem
    assert len(problem.splitlines()) == 1


def test_there_are_enough_lines_and_no_hint_for_a_flag_of_ours():
    assert len(DOES) + len(NAMES) >= 60
    flags = [flag for flags in HINTS.values() for flag in flags]
    assert len(flags) == len(set(flags))
    ours = {opt for param in command("run").params for opt in param.opts}
    assert not ours & HINT_OF.keys()


def test_brackets_in_texts_of_help_and_lists_are_shown():
    for verb in VERBS:
        built = command(verb)
        texts = [built.help, built.epilog, *(getattr(p, "help", None) for p in built.params)]
        for text in filter(None, texts):
            assert Text.from_markup(text).plain == text
    listed = CliRunner().invoke(app, ["list", "arrivals"]).stdout
    assert "E[size]" in re.sub(r"\s+", " ", listed)


def test_a_list_is_names_unless_a_family_or_everything_is_asked_for():
    short = CliRunner().invoke(app, ["list"]).stdout
    whole = CliRunner().invoke(app, ["list", "--full"]).stdout
    assert len(short.splitlines()) <= 30
    assert len(whole.splitlines()) > 200
    assert "arrivals" in short
    assert "poisson" in short
    assert "E[size]" not in short
    assert "E[size]" in re.sub(r"\s+", " ", whole)


@pytest.mark.parametrize(
    ("complete", "typed", "word"),
    [
        (scenarios, "quick", "quickstart"),
        (slos, "cha", "chat"),
        (targets, "ref", "reference"),
        (families, "arr", "arrivals"),
        (settings, "arrivals.kind=poi", "arrivals.kind=poisson"),
    ],
)
def test_values_are_completed(complete, typed, word):
    words = complete(typed)
    assert word in words
    assert all(found.startswith(typed) for found in words)


def test_the_shell_completes_verbs_and_values():
    variables = {"_SLOBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "slobench run quick"}
    result = CliRunner().invoke(app, [], prog_name="slobench", env=variables | {"COMP_CWORD": "2"})
    assert result.stdout.split() == ["quickstart"]
