"""Who may import whom. The table is the documentation; `docs/architecture.md` tells the reasons."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORDS = [
    f"loadgen.{word}"
    for word in ("registry", "records", "clock", "errors", "units", "yaml_document", "timer")
]

# A module may import what stands under the longest prefix of its name, itself and third parties.
ALLOWED: dict[str, list[str]] = {
    # Words are importable by everyone and import nothing of ours but each other.
    **dict.fromkeys(WORDS, WORDS),
    # Cores: pure, see PURE below.
    "loadgen.workload": [
        *WORDS,
        "loadgen.workload",
        *(f"loadgen.measure.{core}" for core in ("slo", "catalog", "statistics")),
    ],
    "loadgen.measure": [*WORDS, "loadgen.measure"],
    "targets": [*WORDS, "targets"],
    "reference_engine": [*WORDS, "reference_engine"],
    "reference_engine.__main__": [*WORDS, "reference_engine", "loadgen.plugins"],
    # Shells: sockets, processes, files, clocks.
    "loadgen.drive": [
        *WORDS,
        "loadgen.drive",
        "loadgen.plugins",
        "loadgen.workload.prompts",
        "loadgen.workload.dialogue",
        *(f"targets.{way}" for way in ("base", "route", "rotation", "dialer")),
        "targets.safe_text",
    ],
    "reports": [*WORDS, "reports", "loadgen.measure"],
    # Wiring and edge.
    "loadgen.run": [*WORDS, "loadgen", "targets", "reports"],
    "loadgen.cells": [*WORDS, "loadgen", "targets"],
    "loadgen.sweep": [*WORDS, "loadgen", "targets", "reports"],
    "loadgen.nightly": [
        *WORDS,
        *(f"loadgen.{name}" for name in ("nightly", "measure", "workload")),
        *(f"loadgen.{name}" for name in ("cells", "run.run_options")),
        *(f"loadgen.{name}" for name in ("drive.instrument", "lab.mode_spec")),
        "targets.embed",
        "targets.endpoint",
        "reports",
    ],
    "loadgen.capacity": [*WORDS, "loadgen", "targets.quiesce", "reports"],
    "loadgen.capacity.early_stop": [
        *WORDS,
        "loadgen.live.watched",
        "loadgen.measure",
        "loadgen.workload",
    ],
    "loadgen.run.recording": [*WORDS, "loadgen", "targets.scrape"],
    "loadgen.run.shard_tasks": [
        *WORDS,
        "loadgen.run.cores",
        "loadgen.drive",
        "loadgen.workload",
        "loadgen.run.target",
        "targets.endpoint",
    ],
    "loadgen.run.fleet": [
        *WORDS,
        "loadgen.drive.shards",
        "loadgen.run.shard_tasks",
        "loadgen.run.target",
        "loadgen.workload",
    ],
    "loadgen.run.manifest": [
        *WORDS,
        "loadgen.drive",
        "loadgen.workload",
        "loadgen.run.target",
        "loadgen.run.run_options",
    ],
    "loadgen.run.conclude": [*WORDS, "loadgen.drive", "loadgen.measure", "reports"],
    "loadgen.run.preload": WORDS,
    "loadgen.run.cores": [*WORDS, "loadgen.drive"],
    "loadgen.run.directory": WORDS,
    "loadgen.run.run_options": WORDS,
    # The one place that knows both the load generator and the engine.
    "loadgen.lab": [*WORDS, "loadgen", "targets", "reports", "reference_engine"],
    "loadgen.run.target": [*WORDS, "loadgen.workload", "loadgen.run.preload", "targets"],
    "loadgen.doctor": [*WORDS, "loadgen", "targets"],
    "loadgen.plugins": WORDS,
    "loadgen.translate": [*WORDS, "loadgen.translate", "loadgen.workload"],
    "loadgen.live": [
        *WORDS,
        "loadgen.live",
        "loadgen.measure",
        "loadgen.drive.live_sample",
        "loadgen.run.run_options",
    ],
    "loadgen.live.watching": [
        *WORDS,
        "loadgen.live",
        "loadgen.measure.slo",
        "loadgen.run.run_options",
        "loadgen.run.target",
        "loadgen.workload.scenario",
    ],
    # Locust is imported here and nowhere else: importing it patches the process.
    "loadgen.web": [*WORDS, "loadgen", "targets", "reports"],
    "loadgen.exports": [*WORDS, "loadgen.exports", "loadgen.measure"],
    "loadgen.cli": [
        "loadgen",
        "reports",
        "reference_engine.serve",
        "reference_engine.serving.serve_options",
    ],
    "loadgen.__main__": ["loadgen.cli"],
    "slobench": [*WORDS, "loadgen"],
    "scenarios": [],
}
PURE = [
    "loadgen.workload",
    "loadgen.measure",
    "targets.base",
    "targets.openai_chat",
    "targets.openai_completions",
    "targets.openai_wire",
    "targets.address",
    "targets.route",
    "targets.route",
    "targets.preflight_result",
    "targets.preflight_checks",
    "targets.mock_script",
    "targets.mock_wire",
    "reference_engine.state.sequence",
    "reference_engine.state.kv",
    "reference_engine.state.plan",
    "reference_engine.policies",
    "reference_engine.smdp",
    "reference_engine.core.core",
    "reference_engine.core.paused_tenants",
    "reference_engine.core.interventions",
    "reference_engine.accounting.totals",
    "reference_engine.policy_testing.policy_traffic",
    "reference_engine.policy_testing.watched_policy",
    "reference_engine.state.cost_model",
    "reference_engine.accounting.explain",
    "reference_engine.simulator",
    "reference_engine.policy_testing.policy_workloads",
    "reference_engine.executors.simulated",
    "reference_engine.executors.delayed",
    "reference_engine.accounting.ledger",
    "reference_engine.state.queues",
    "reference_engine.state.steps",
    "reference_engine.state.step_tokens",
    "reference_engine.state.admission",
    "reference_engine.core.placement",
    "reference_engine.accounting.accounting",
    "reference_engine.accounting.displacement",
    "reference_engine.state.forecast",
    "reference_engine.accounting.tenants",
    "reference_engine.attribution.attribution",
    "reference_engine.core.setup",
    "reference_engine.attribution.counterfactual",
    "reference_engine.attribution.observed_cost",
    "reference_engine.step_log.log_replay",
    "reference_engine.core.planned",
    "reference_engine.core.commit",
    "reference_engine.state.swap",
    "reference_engine.predict",
    "reference_engine.serving.wire",
    "reference_engine.metrics.histograms",
    "reference_engine.metrics.metrics",
    "reference_engine.metrics.exposition",
    "reference_engine.serving.departures",
    "reports.run.failures",
    "reports.run.frames",
    "reports.charts",
    "reports.capacity.charts",
    "reports.capacity.view",
    "reports.compare.curves",
    "reports.compare.charts",
    "reports.compare.view",
    "reports.series",
    "reports.sweep.charts",
    "reports.sweep.view",
    "reports.nightly.view",
    "reports.nightly.charts",
    "reports.nightly.junit",
]
IMPURE = {"asyncio", "time", "random", "os", "socket", "subprocess", "torch"}
TORCH_IN = (
    "reference_engine.executors.torch_",
    "reference_engine.executors.cuda_stream",
    "reference_engine.model",
    "reference_engine.kernels",
)
OURS = ("loadgen", "targets", "reference_engine", "reports", "scenarios", "slobench")


def modules():
    for package in OURS:
        for path in sorted([ROOT / f"{package}.py", *(ROOT / package).rglob("*.py")]):
            if path.exists():
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path):
    """Every module a file names in an import, at any depth, but not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module in OURS:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def is_under(module, prefix):
    return module == prefix or module.startswith(prefix + ".")


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_imports_point_downwards(module, path):
    rule = max((name for name in ALLOWED if is_under(module, name)), key=len, default=None)
    if module in OURS and path.name == "__init__.py":
        assert list(imports(path)) == [], "an __init__.py holds its docstring and nothing else"
        return
    assert rule is not None, f"{module} has no line in ALLOWED"
    for imported in imports(path):
        if imported.split(".")[0] in OURS:
            allowed = any(is_under(imported, name) for name in ALLOWED[rule])
            assert allowed, f"{module} may not import {imported}"


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_pure_modules_import_no_clock_chance_or_socket(module, path):
    if any(is_under(module, name) for name in PURE):
        assert not {name.split(".")[0] for name in imports(path)} & IMPURE
    if not module.startswith(TORCH_IN):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}


def test_importing_the_load_generator_loads_nothing_heavy():
    import subprocess

    code = "import sys, loadgen.cli.app, slobench; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"locust", "gevent", "torch", "pandas", "scipy", "pyarrow"} & set(loaded)


# What takes long to import and is not needed before the first question to the server, or not at
# all by a process that generates load. Its time is the user's: see docs/decisions/0037.
LATE = {
    "loadgen.run.execute, targets.preflight, targets.openai_chat": {
        *("aiohttp", "pyarrow", "pandas", "scipy", "jinja2", "uvloop", "rich.live", "rich.table"),
        *("reports", "loadgen.run.recording", "loadgen.run.conclude", "reference_engine"),
    },
    "loadgen.drive.shard": {
        *("aiohttp", "pyarrow", "pandas", "scipy", "jinja2", "rich", "typer", "yaml"),
        *("reports", "loadgen.workload.scenario", "loadgen.measure.aggregate", "targets.endpoint"),
    },
}


@pytest.mark.parametrize("modules", LATE)
def test_what_is_not_needed_at_once_is_imported_later(modules):
    import subprocess

    code = f"import sys, {modules}; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not LATE[modules] & set(said.stdout.split())


GEVENT = {
    f"loadgen.web.{name}"
    for name in ("locust_events", "locustfile", "locust_master", "locust_worker", "locust_page")
}


@pytest.mark.parametrize(("module", "path"), list(modules()))
def test_locust_is_imported_in_its_own_processes_only(module, path):
    patching = {name.split(".")[0] for name in imports(path)} & {"locust", "gevent", "flask"}
    assert not patching or module in GEVENT
    assert module in GEVENT or not GEVENT & set(imports(path))


def test_what_conducts_and_what_generates_load_is_not_patched():
    import subprocess

    code = "import sys, loadgen.web.control_process, loadgen.web.load_process; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"locust", "gevent"} & set(loaded)


@pytest.mark.parametrize("words", ["--help", "run quickstart --print-scenario"])
def test_a_command_line_loads_nothing_heavy_before_it_has_something_to_do(words):
    import subprocess

    code = (
        "import sys\n"
        "from loadgen.cli.app import app\n"
        "from loadgen.cli.exit_codes import guarded\n"
        f"sys.argv[1:] = {words.split()}\n"
        "code = guarded(app, {})\n"
        "print('modules:', *sys.modules)\n"
        "raise SystemExit(code)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(said.stdout.rpartition("modules:")[2].split())
    heavy = {"pandas", "scipy", "pyarrow", "vl_convert", "locust", "torch", "loadgen.exports"}
    assert "loadgen.cli.app" in loaded
    assert not heavy & loaded
