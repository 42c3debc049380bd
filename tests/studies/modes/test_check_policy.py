"""`slobench modes --check-policy FILE`: the answer first, then the evidence."""

import json

import pytest

IN_ORDER = '''
"""First come, first served, whole prompts."""

from typing import ClassVar

from reference_engine.plan import Cause, Item, Plan, Why
from reference_engine.policies.base import POLICIES, Policy


class InOrder(Policy):
    kind: ClassVar[str] = "in_order"
    is_work_conserving: ClassVar[bool] = True
    max_num_seqs: int = 8

    def plan(self, view):
        items, free = [], view.kv.n_free - view.decode_blocks
        for request in view.prefilling:
            items.append(Item(request.id, view.to_compute(request)))
            free -= view.kv.missing(request, items[-1].n_tokens)
        slots = min(self.max_num_seqs, view.limits.max_num_seqs) - len(view.running)
        for request in self.order(view):
            need = view.kv.missing_to_admit(request, view.to_compute(request))
            if slots <= 0 or need > free:
                break
            items.append(Item(request.id, view.to_compute(request)))
            free, slots = free - need, slots - 1
        return Plan(tuple(items), decode_all=True, rest=Cause(Why.no_seq_slot))

    def order(self, view):
        return list(view.waiting)
'''
ORACLE = """

@POLICIES.register
class ShortAnswers(InOrder):
    kind: ClassVar[str] = "short_answers"

    def order(self, view):
        return sorted(view.waiting, key=lambda r: r.oracle_output_tokens)
"""
REGISTERED = """
from reference_engine.policies.base import POLICIES
from reference_engine.policies.prefill_first import PrefillFirst

POLICIES.register(type("Renamed", (PrefillFirst,), {"__module__": "elsewhere", "kind": "renamed"}))
"""


@pytest.fixture
def check(tmp_path, cli):
    """Runs `slobench modes --check-policy FILE` on a text; the exit code, stdout and stderr."""

    def run(text, *words):
        (tmp_path / "mine.py").write_text(text)
        result = cli("modes", "--check-policy", "mine.py", *words, cwd=tmp_path)
        return result.returncode, result.stdout, result.stderr

    return run


def test_a_correct_policy_passes_and_one_that_reads_the_oracle_fails_with_a_counterexample(check):
    code, out, _ = check(IN_ORDER + ORACLE)
    lines = out.splitlines()
    assert code == 1
    assert lines[0].startswith("in_order passes: it keeps 8 rules in 40 random workloads (")
    assert lines[1].endswith("no leak, determinism, preemption, work conservation")
    assert lines[2] == "short_answers fails the check of no oracle:"
    assert "plan() reads request.oracle_output_tokens (mine.py:" in lines[3]
    at = lines.index("  The smallest workload found that shows it:")
    assert lines[at + 1].startswith("    1 requests, ")
    assert lines[at + 2].startswith("    r")


def test_the_results_as_json(check):
    code, out, _ = check(IN_ORDER + ORACLE, "--json")
    content = json.loads(out)
    good, bad = content["policies"]
    assert (code, content["kind"], content["passes"]) == (1, "policy_check", False)
    assert (good["policy"], good["passes"], good["n_workloads"]) == ("in_order", True, 40)
    assert good["n_steps"] > 1000
    assert "work conservation" in good["rules"]
    assert (bad["policy"], bad["passes"], bad["rules"]) == ("short_answers", False, [])
    assert bad["broken_rule"] == "no oracle"
    assert bad["counterexample"].startswith("1 requests, ")


def test_a_registered_policy_of_another_module_is_checked(check):
    code, out, _ = check(REGISTERED)
    assert (code, out.split()[:2]) == (0, ["renamed", "passes:"])


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("x = 1\n", [], "defines no batching policy: a class with a `kind`"),
        ("raise KeyError(7)\n", [], "mine.py: KeyError: 7 ("),
        (IN_ORDER.replace("seqs: int = 8", "seqs: int"), [], "in_order: max_num_seqs: Field req"),
        (IN_ORDER, ["chat_poisson"], "--check-policy has workloads of its own"),
        (IN_ORDER, ["--rate", "3"], "--check-policy has workloads of its own"),
    ],
)
def test_a_file_or_a_flag_that_does_not_fit_is_refused(check, text, words, message):
    code, out, err = check(text, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_a_policy_with_a_clock_fails_without_a_workload(check):
    code, out, _ = check("import time\n" + IN_ORDER)
    assert code == 1
    assert out.startswith("in_order fails the check of determinism:\n  mine.py:1 imports time;")
    assert "workload" not in out
