"""Other distributions that provide a top-level package of slobench's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

TOP_LEVEL = ("loadgen", "reference_engine", "reports", "scenarios", "slobench", "targets")
OWN = "slobench"
ROOT = Path(__file__).parents[2]


def shadow(
    root: Path = ROOT, find: Callable[[str], ModuleSpec | None] = find_spec
) -> tuple[str, str] | None:
    """The first package that Python would import from elsewhere than `root`, with its place. Takes
    0.4 ms."""
    for name in TOP_LEVEL:
        spec = find(name)
        if spec is not None and spec.origin and not Path(spec.origin).is_relative_to(root):
            return name, str(Path(spec.origin).parent)
    return None


def problem() -> str | None:
    """The message for a package that another distribution or file shadows; None where all are
    slobench's."""
    found = shadow()
    if found is None:
        return None
    name, place = found
    owners = ", ".join(sharing().get(name, ())) or "a file of yours"
    return (
        f"the package '{name}' in {place} is not slobench's; it belongs to {owners}. Remove it, or "
        "install slobench into an environment of its own"
    )


def sharing(owners: Mapping[str, Sequence[str]] | None = None) -> dict[str, list[str]]:
    """Package of slobench's name → the other distributions that provide it too. `owners` are
    distributions by package; reading them takes half a second."""
    if owners is None:
        from importlib.metadata import packages_distributions

        owners = packages_distributions()
    others = {name: sorted(set(owners.get(name, ())) - {OWN}) for name in TOP_LEVEL}
    return {name: names for name, names in others.items() if names}
