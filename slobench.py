"""slobench in a notebook or a script: `import slobench as sb`.

    run = sb.run("quickstart", "http://localhost:8000", rate="8/s", duration="30s")
    run.requests.ttft_s.describe(); sb.summarize(run).verdict
    sb.simulate("chat_poisson", policy=MyPolicy()); sb.testing.check_policy(MyPolicy)

Names are loaded on first use, so that importing this costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    from loadgen.system.shadowing import problem
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("loadgen.system"):
        raise
    raise ImportError("the package 'loadgen' belongs to another distribution or file") from None
if (_problem := problem()) is not None:
    raise ImportError(_problem)
if TYPE_CHECKING:
    from loadgen.lab.engine_log import replay as replay
    from loadgen.lab.simulate import simulate as simulate
    from loadgen.run.execute import run as run
    from loadgen.run.recorded import export as export
    from loadgen.run.recorded import summarize as summarize
    from loadgen.run.shown_run import read_run as read_run
    from loadgen.studies.capacity.run import capacity as capacity
    from loadgen.studies.compare.numbers import compare as compare
    from loadgen.studies.compare.numbers import measure_noise as measure_noise
    from loadgen.studies.nightly.run import nightly as nightly
    from loadgen.studies.sweep.run import sweep as sweep
    from loadgen.workload.scenario import load_scenario as load_scenario
    from loadgen.workload.schedule import make_schedule as make_schedule

_HOMES = {
    "capacity": "loadgen.studies.capacity.run",
    "load_scenario": "loadgen.workload.scenario",
    "make_schedule": "loadgen.workload.schedule",
    "run": "loadgen.run.execute",
    "simulate": "loadgen.lab.simulate",
    "replay": "loadgen.lab.engine_log",
    "read_run": "loadgen.run.shown_run",
    "summarize": "loadgen.run.recorded",
    "compare": "loadgen.studies.compare.numbers",
    "measure_noise": "loadgen.studies.compare.numbers",
    "sweep": "loadgen.studies.sweep.run",
    "nightly": "loadgen.studies.nightly.run",
    "export": "loadgen.run.recorded",
}
_MODULES = {"testing": "reference_engine.policy_testing.policy_check"}
__all__ = [
    "capacity",
    "compare",
    "export",
    "load_scenario",
    "make_schedule",
    "measure_noise",
    "nightly",
    "read_run",
    "replay",
    "run",
    "simulate",
    "summarize",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'slobench' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES])
