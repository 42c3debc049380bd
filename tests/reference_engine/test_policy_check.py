"""The policy check: a deliberately broken policy per rule, and correct policies that pass."""

import pytest
from pydantic import PrivateAttr

from reference_engine.policies.base import POLICIES, Policy
from reference_engine.policy_testing.policy_check import check_policy
from reference_engine.policy_testing.watched_policy import PolicyFault
from reference_engine.state.plan import Cause, Item, Plan, Preemption, Why


class Simple(Policy):
    """First come, first served, whole prompts, all decodes: the base of the broken policies."""

    kind = "simple"
    is_work_conserving = True
    max_num_seqs: int = 8

    def plan(self, view):
        items, free = [], view.kv.n_free - view.decode_blocks
        for request in view.prefilling:
            items.append(Item(request.id, view.to_compute(request)))
            free -= view.kv.missing(request, items[-1].n_tokens)
        slots = min(self.max_num_seqs, view.limits.max_num_seqs) - len(view.running)
        for request in self.order(view):
            n_tokens = view.to_compute(request)
            need = view.kv.missing_to_admit(request, n_tokens)
            if slots <= 0 or need > free:
                break
            items.append(Item(request.id, n_tokens))
            free, slots = free - need, slots - 1
        return Plan(tuple(items), decode_all=True, rest=Cause(Why.no_seq_slot))

    def order(self, view):
        return list(view.waiting)


class Overfull(Simple):
    def plan(self, view):
        return Plan(tuple(Item(r.id, view.to_compute(r)) for r in [*view.running, *view.waiting]))


class Stranger(Simple):
    def plan(self, view):
        return Plan((Item("nobody", 1),))


class Lazy(Simple):
    def plan(self, view):
        return Plan(decode_all=True) if len(view.waiting) > 1 else super().plan(view)


class Endless(Simple):
    is_work_conserving = False

    def plan(self, view):
        return Plan(wait_until_s=float("inf"))


class Circles(Simple):
    is_work_conserving = False

    def plan(self, view):
        if view.running:
            undone = tuple(Preemption(r.id) for r in view.running)
            return Plan(preempt=undone, wait_until_s=view.now_s + 1)
        return Plan((Item(next(iter(view.waiting)).id, 1),))


class Meddler(Simple):
    def on_arrival(self, request, view):
        request.priority = 0


class Cheat(Simple):
    def order(self, view):
        return sorted(view.waiting, key=lambda r: r.oracle_output_tokens)


CALLS: list[int] = []


class Fickle(Simple):
    def order(self, view):
        CALLS.append(1)
        return sorted(view.waiting, key=lambda r: hash((r.id, len(CALLS) // 7)))


class Unordered(Simple):
    def order(self, view):
        ids = {r.id for r in view.waiting}
        return [view.find(request_id) for request_id in ids]


class Idler(Simple):
    def plan(self, view):
        if not view.running and len(view.waiting) == 1 and not view.is_source_closed:
            return Plan(wait_until_s=view.now_s + 0.01)
        return super().plan(view)


class Clumsy(Simple):
    def on_finish(self, request, view):
        raise KeyError(request.id)


class Shortest(Simple):
    is_aged = True
    starvation: float = 2.0

    def order(self, view):
        return sorted(view.waiting, key=lambda r: r.n_prompt)


class Patient(Shortest):
    def order(self, view):
        late_s = view.now_s - self.starvation
        return sorted(
            view.waiting,
            key=lambda r: (0, r.arrived_s) if r.arrived_s <= late_s else (1, r.n_prompt),
        )


class Remembers(Simple):
    _arrived_s: dict[str, float] = PrivateAttr(default_factory=dict)

    def on_arrival(self, request, view):
        self._arrived_s[request.id] = view.now_s

    def on_finish(self, request, view):
        del self._arrived_s[request.id]

    def order(self, view):
        return sorted(view.waiting, key=lambda r: (r.priority, self._arrived_s[r.id]))


class Forgiver(Simple):
    """Removes SLOs, so that it cannot miss any."""

    def on_step_end(self, record, view):
        for request in view.waiting:
            request.ttft_slo_s = None


class Hoarder(Simple):
    """Takes a block without the engine's knowledge, and leaves another in its place."""

    def on_finish(self, request, view):
        view.kv._blank[0] = view.kv._blank[1]


class MostUrgent(Simple):
    """One request at a time, the lowest priority first; a more urgent request takes its place."""

    max_num_seqs: int = 1

    def order(self, view):
        return sorted(view.waiting, key=lambda r: (r.priority, r.arrived_s))

    def plan(self, view):
        head = next(iter(self.order(view)), None)
        worse = [r for r in view.decoding if head and r.priority > head.priority]
        if head is None or not worse:
            return super().plan(view)
        return Plan((self.first(view, head),), preempt=(Preemption(worse[0].id, by=head.id),))

    def first(self, view, request):
        return Item(request.id, view.to_compute(request))


class Unfaithful(MostUrgent):
    """Preempts for a request and then serves in another order."""

    is_work_conserving = False

    def plan(self, view):
        plan = super().plan(view)
        return plan._replace(items=(), wait_until_s=view.now_s + 1) if plan.preempt else plan

    def order(self, view):
        ranked = super().order(view)
        return ranked if view.running else ranked[::-1]


class RoundRobin(MostUrgent):
    """Every step another request."""

    def plan(self, view):
        head = next(iter(view.waiting), None)
        if head is None or not view.decoding or head.n_preemptions >= 20:
            return super().plan(view)
        victim = next(iter(view.decoding))
        return Plan((self.first(view, head),), preempt=(Preemption(victim.id, by=head.id),))


FEW_REQUESTS = 81  # a seed whose first workloads have 2, 9, 6 and 5 requests


@pytest.mark.parametrize(
    ("policy", "rule", "message"),
    [
        (Overfull, "plans", "sequences run, limit"),
        (Stranger, "plans", "plan schedules 'nobody', which neither waits nor runs"),
        (Lazy, "progress", "wait, 0 run, and the plan is empty without wait_until_s"),
        (Endless, "progress", "policy 'simple' waits for ever"),
        (Circles, "progress", "not done after"),
        (Meddler, "read-only", "on_arrival() changed r"),
        (Forgiver, "read-only", "ttft_slo_s was 0.5, is None"),
        (Hoarder, "no leak", "the engine's state is inconsistent: block "),
        (Cheat, "no oracle", "plan() reads request.oracle_output_tokens (test_policy_check.py:"),
        (Fickle, "determinism", "the same workload gave two different plans in step"),
        (Unordered, "determinism", "sort sets before use"),
        (Idler, "work conservation", "claims is_work_conserving but is idle at"),
        (Unfaithful, "preemption", "it admits r"),
        (RoundRobin, "preemption", " finished requests in 12 workloads, more than 3 for each"),
        (Clumsy, "plans", "on_finish() raised KeyError: "),
        (Shortest, "aging", "it claims is_aged with starvation 2 s, but a long request"),
        (Shortest(max_num_seqs=1), "aging", "but a long request"),
    ],
)
def test_each_broken_policy_raises_a_fault_of_its_rule(policy, rule, message):
    with pytest.raises(PolicyFault) as fault:
        check_policy(policy, n_workloads=12, seed=FEW_REQUESTS)
    assert fault.value.rule == rule
    assert message in str(fault.value)


def test_a_fault_shows_the_smallest_workload_that_causes_it():
    with pytest.raises(PolicyFault) as fault:
        check_policy(Lazy, n_workloads=12)
    assert "with 3 requests, " in str(fault.value)  # one to run, two to wait
    with pytest.raises(PolicyFault) as fault:
        check_policy(Stranger, n_workloads=12)
    assert "with 1 requests, " in str(fault.value)


@pytest.mark.parametrize("policy", [Simple, Patient, Remembers, MostUrgent, Simple(max_num_seqs=2)])
def test_a_correct_policy_passes(policy):
    report = check_policy(policy, n_workloads=4, seed=FEW_REQUESTS)
    assert report.n_workloads == 4
    assert "work conservation" in report.rules
    assert ("aging" in report.rules) == (policy is Patient)


@pytest.mark.parametrize("mode", ["sjf", "priority", "mlfq"])
@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_an_aged_mode_with_few_slots_is_flooded_at_its_own_capacity(mode, max_num_seqs):
    """At 1.3 times the capacity of four slots, one slot is five times overloaded: the requests that
    are due before a waiting one then need longer than its starvation limit in any order."""
    policy = POLICIES.build({"kind": mode, "max_num_seqs": max_num_seqs})
    report = check_policy(policy, n_workloads=1, seed=FEW_REQUESTS)
    assert "aging" in report.rules


def test_a_policy_that_imports_a_clock_is_rejected_before_it_runs(tmp_path):
    from loadgen.system.plugins import load_plugin

    plugin = tmp_path / "clocked.py"
    plugin.write_text(
        "import time\n"
        "from reference_engine.policies.base import POLICIES, Policy\n"
        "@POLICIES.register\n"
        "class Clocked(Policy):\n"
        "    kind = 'clocked'\n"
        "    def plan(self, view):\n"
        "        raise AssertionError(time.time())\n"
    )
    load_plugin(plugin)
    with pytest.raises(PolicyFault, match=r"clocked\.py:1 imports time"):
        check_policy(POLICIES.get("clocked"))


@pytest.mark.parametrize("mode", sorted({POLICIES.get(name).kind for name in POLICIES.names()}))
def test_every_mode_passes(mode):
    if mode != "clocked":
        check_policy(POLICIES.get(mode), n_workloads=4, seed=FEW_REQUESTS)
