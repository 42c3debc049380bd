"""Damaged results of other load generators: a run, or a refusal that names the file."""

import json

import pytest

from loadgen.errors import UsageError
from loadgen.foreign.read import imported_runs
from tests.foreign.results import (
    aiperf_record,
    aiperf_summary,
    endpoints_event,
    guidellm_report,
    guidellm_request,
    inference_perf_request,
    lines,
    sglang,
    vllm,
    vllm_rs,
)

BAD: tuple[object, ...] = (None, -1, 1e308, 10**30, "x", [], {})


def values(content, path=()):
    """The paths of all values inside a JSON value."""
    if isinstance(content, dict | list):
        pairs = content.items() if isinstance(content, dict) else enumerate(content)
        for key, inner in list(pairs):
            yield (*path, key)
            yield from values(inner, (*path, key))


def with_value(content, path, value):
    changed = json.loads(json.dumps(content))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


def refused(file):
    """The message of a refusal, "" for a file that gives a run."""
    try:
        return "" if list(imported_runs([file], [], "")) else "no run"
    except UsageError as error:
        return str(error)


CASES = {
    "vllm": vllm(),
    "a closed loop of vllm": vllm(request_rate="inf", max_concurrency=2, start_times=None),
    "vllm-rs": vllm_rs(),
    "sglang": sglang(),
    "aiperf": aiperf_record(0),
    "a closed loop of guidellm": guidellm_report(
        guidellm_request(0), type_="concurrent", streams=2
    ),
    "endpoints": endpoints_event("sample.issued", 0, "r0", ["PromptData", None, [1]]),
    "inference-perf": [inference_perf_request(0), inference_perf_request(1)],
    "guidellm": guidellm_report(guidellm_request(0), guidellm_request(1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_result_with_any_value_replaced_is_a_run_or_refused_by_name(case, tmp_path):
    file = tmp_path / "e.jsonl"
    n_refused = 0
    for path in values(CASES[case]):
        for bad in BAD:
            file.write_text(json.dumps(with_value(CASES[case], path, bad)))
            refusal = refused(file)
            assert refusal.startswith(str(file)) or not refusal, (path, bad)
            n_refused += bool(refusal)
    assert n_refused >= 20


def test_a_summary_with_any_value_replaced_is_a_run_or_refused_by_name(tmp_path):
    file, summary = tmp_path / "e.jsonl", tmp_path / "e_aiperf.json"
    file.write_text(lines(aiperf_record(0)))
    n_refused = 0
    for path in values(aiperf_summary(concurrency=2)):
        for bad in BAD:
            summary.write_text(json.dumps(with_value(aiperf_summary(concurrency=2), path, bad)))
            refusal = refused(file)
            assert refusal.startswith(str(summary)) or not refusal, (path, bad)
            n_refused += bool(refusal)
    assert n_refused > 20


@pytest.mark.parametrize("case", CASES)
def test_a_truncated_result_is_refused_with_its_line(case, tmp_path):
    file = tmp_path / "e.jsonl"
    text = json.dumps(CASES[case])
    for length in range(1, len(text), max(1, len(text) // 60)):
        file.write_text(text[:length])
        with pytest.raises(UsageError, match=f"^{file}:1: damaged JSON at character \\d+: "):
            list(imported_runs([file], [], ""))
