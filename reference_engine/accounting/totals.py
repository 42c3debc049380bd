"""Running totals of an engine and of each tenant."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from reference_engine.accounting.explain import Account

_MOST_TENANTS = 1024
_OTHERS = "other"


@dataclass(slots=True)
class EngineTotals:
    """Totals since the engine started."""

    steps: int = 0
    admitted: int = 0
    preemptions: int = 0
    swaps: int = 0  # of the preemptions
    prompt_tokens: int = 0  # computed, so recomputation counts again
    output_tokens: int = 0
    cached_tokens: int = 0
    padding_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    rejected_plans: int = 0
    copied_out_blocks: int = 0  # of KV, to host memory
    copied_back_blocks: int = 0
    copying_s: float = 0.0  # by the host's own times

    def plus(self, other: EngineTotals) -> EngineTotals:
        """The totals of two engines."""
        sums = (getattr(self, f.name) + getattr(other, f.name) for f in fields(self))
        return EngineTotals(*sums)


@dataclass(slots=True)
class TenantAccount:
    """Totals of a tenant's finished requests. `displaced_s` is the wait that its requests added to
    earlier arrivals by being admitted before them, `pushed_back_s` the wait that others' jumps
    added to its own; `wait_s` is by reason."""

    n_finished: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    displaced_s: float = 0.0
    pushed_back_s: float = 0.0
    wait_s: dict[str, float] = field(default_factory=dict)


class TenantAccounts(dict[str, TenantAccount]):
    """Accounts by tenant. Clients choose the names, so tenants beyond the first thousand share an
    account."""

    def of(self, tenant: str) -> TenantAccount:
        if tenant not in self and len(self) >= _MOST_TENANTS:
            tenant = _OTHERS
        return self.setdefault(tenant, TenantAccount())

    def add(self, entry: Account) -> None:
        """Add a request that is over."""
        tenant = self.of(entry.tenant)
        tenant.n_finished += 1
        tenant.input_tokens += entry.input_tokens
        tenant.output_tokens += entry.output_tokens
        tenant.pushed_back_s += entry.pushed_back_s
        for cause, seconds in entry.waits:
            tenant.wait_s[cause.why.name] = tenant.wait_s.get(cause.why.name, 0.0) + seconds
