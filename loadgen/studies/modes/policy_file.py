"""The check of the batching policies in a Python file (`slobench modes --check-policy FILE`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.system.plugins import load_plugin
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.policy_testing.policy_check import check_policy
from reference_engine.policy_testing.watched_policy import PolicyFault

FLAG = "--check-policy"


@dataclass(frozen=True, slots=True)
class CheckedPolicy:
    """The result for a policy. One that `passes` keeps `rules` in `n_workloads` workloads with
    `n_steps` engine steps; another breaks `broken_rule`, as `detail` shows, in the workload
    `counterexample` ("" where no requests are needed to see it)."""

    policy: str
    passes: bool
    rules: tuple[str, ...] = ()
    n_workloads: int = 0
    n_steps: int = 0
    broken_rule: str = ""
    detail: str = ""
    counterexample: str = ""

    def to_json(self) -> JsonObject:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The answer, then its evidence."""
        if self.passes:
            yield (
                f"{self.policy} passes: it keeps {len(self.rules)} rules in {self.n_workloads} "
                f"random workloads ({self.n_steps} engine steps)."
            )
            yield f"  rules: {', '.join(self.rules)}"
            return
        yield f"{self.policy} fails the check of {self.broken_rule}:"
        yield from (f"  {line}" for line in self.detail.splitlines())
        if self.counterexample:
            yield "  The smallest workload found that shows it:"
            yield from (f"    {line.strip()}" for line in self.counterexample.splitlines())


def check_file(path: Path) -> list[CheckedPolicy]:
    """The result of each policy that a file defines or registers, with default parameters.

    Raises UsageError if the file cannot be run, holds no policy, or holds a policy with a parameter
    that has no default.
    """
    return [_checked(policy) for policy in _policies_in(path)]


def _policies_in(path: Path) -> list[Policy]:
    known = set(POLICIES.names())
    module = load_plugin(path, FLAG)
    defined = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Policy)
        and value.__module__ == module.__name__
        and not inspect.isabstract(value)
        and hasattr(value, "kind")
    ]
    registered = [POLICIES.get(name) for name in POLICIES.names() if name not in known]
    classes = list(dict.fromkeys([*defined, *registered]))
    if not classes:
        raise UsageError(
            f"{FLAG} {path}: defines no batching policy: a class with a `kind` and a method "
            "`plan`, derived from reference_engine.policies.base.Policy"
        )
    return [_with_defaults(cls, path) for cls in classes]


def _with_defaults(cls: type[Policy], path: Path) -> Policy:
    try:
        return cls()
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UsageError(f"{FLAG} {path}: {cls.kind}: {key}: {problem['msg']}") from None


def _checked(policy: Policy) -> CheckedPolicy:
    try:
        report = check_policy(policy)
    except PolicyFault as fault:
        detail, _, workload = fault.detail.partition("\n\nwith ")
        return CheckedPolicy(
            policy.kind, False, broken_rule=fault.rule, detail=detail, counterexample=workload
        )
    return CheckedPolicy(policy.kind, True, report.rules, report.n_workloads, report.n_steps)
