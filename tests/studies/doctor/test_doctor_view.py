"""A doctor's visit on the terminal: verdict first, 100 columns, readable without colour."""

import io
from typing import Any

from rich.console import Console

from loadgen.drive.instrument import host
from loadgen.manifest.json_section import read_section
from loadgen.studies.doctor.result import Checkup
from loadgen.studies.doctor.view import tables

SPREAD = {"n": 200, "p50": 1e-4, "p99": 4e-4, "max": 1e-3, "few": True}
TRIAL = {
    "rate_per_s": 400.0, "tokens_per_s": 25600.0, "n_requests": 800, "cpu_s_per_token": 9e-6,
    "ttft_error_s": SPREAD, "tpot_error_s": SPREAD | {"p50": -2e-7, "p99": 4e-6},
    "lateness_s": SPREAD, "server_lateness_s": SPREAD, "problems": [], "causes": [],
    "holds": True, "wall_s": 4.0,
}  # fmt: skip
LATE = TRIAL | {"rate_per_s": 800.0, "causes": ["run delay", "lateness"], "holds": False}
FACTS: dict[str, Any] = {
    "kind": "machine", "is_fit": True, "exit_code": 0, "reasons": [], "notes": ["a note"],
    "target": None, "host": host().to_json(), "proven_rate_per_s": None,
    "checks": [
        {"check": "cores", "ok": None, "detail": "2 usable", "consequence": "keep the rate low"},
        {"check": "clock", "ok": True, "detail": "tsc, 30 ns to read", "consequence": ""},
    ],
    "judge": "truth", "error_limit_s": 5e-3, "output_tokens": 64, "trials": [TRIAL, LATE],
    "ceiling": {"rate_per_s": 400.0, "tokens_per_s": 25600.0, "ttft_error_p99_s": 4e-4,
                "is_at_least": False, "file": None},
}  # fmt: skip


def shown(**changes):
    out = io.StringIO()
    checkup = read_section(FACTS | changes, Checkup, "a check")
    Console(file=out, width=100, color_system=None).print(tables(checkup))
    return out.getvalue()


def test_the_ceiling_stands_first():
    text = shown()
    assert text.startswith("up to 400 req/s × 64 tokens per core, with p99 TTFT error below 5 ms\n")
    assert "at least 400 req/s" in shown(ceiling=FACTS["ceiling"] | {"is_at_least": True})
    assert max(map(len, text.splitlines())) <= 100


def test_each_trial_is_a_line_with_what_made_it_fail():
    lines = [" ".join(line.split()) for line in shown().splitlines()]
    assert "400 800 0.10 / 0.40* -0.2 / 4.0* 0.10 / 0.40* 0.40* 9.0 accurate" in lines
    failed = next(line for line in lines if line.startswith("800 800"))
    assert failed.endswith("run delay, lateness")
    assert "note: a note" in lines
    assert shown(trials=[TRIAL | {"holds": False}]).count("  TTFT error\n") == 1


def test_a_trial_without_an_answer_has_dashes():
    none = dict.fromkeys(SPREAD) | {"n": 0, "few": True}
    trial = TRIAL | {"ttft_error_s": none, "server_lateness_s": none, "tpot_error_s": none}
    lines = [" ".join(line.split()) for line in shown(trials=[trial]).splitlines()]
    assert "400 800 – – 0.10 / 0.40* – 9.0 accurate" in lines


def test_advice_stands_under_its_check():
    lines = [line.split() for line in shown().splitlines()]
    assert ["–", "cores", "2", "usable"] in lines
    assert ["→", "keep", "the", "rate", "low"] in lines
    assert ["ok", "clock", "tsc,", "30", "ns", "to", "read"] in lines


def test_what_cannot_be_measured_with_says_why_first():
    text = shown(is_fit=False, reasons=["20 req/s × 64 tokens: the machine was busy"])
    assert text.splitlines()[:2] == [
        "NOT FIT FOR MEASURING", "  20 req/s × 64 tokens: the machine was busy",
    ]  # fmt: skip


def test_a_proof_and_a_server_have_their_own_words():
    text = shown(kind="proof", proven_rate_per_s=400.0)
    assert text.startswith("accurate up to 400 req/s × 64 tokens, with p99 TTFT error below 5 ms")
    text = shown(kind="target", target="http://x", trials=[])
    assert text.startswith("http://x can be measured from here\n")
