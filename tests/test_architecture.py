"""The allowed imports. The tables are the documentation; docs/architecture.md has the reasons."""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Rooms (folders and loose modules) from the top down: a module may import its own room and the
# rooms on later lines, no other room.
ROOMS: dict[str, list[str]] = {
    "loadgen": [
        "__main__ web",
        "studies",
        "cli",
        "lab",
        "run",
        "exports live",
        "drive foreign translate",
        "archive",
        "workload",
        "measure",
        "records registry",
        "manifest fields yaml_document",
        "system units",
        "errors",
    ],
    "reference_engine": [
        "__main__",
        "serve_replicas",
        "serve",
        "serving",
        "attribution cluster policy_testing",
        "simulator step_core step_log",
        "core",
        "executors",
        "metrics model policies",
        "accounting kernels plan predict sequence smdp",
        "state",
    ],
}
WORDS = [
    f"loadgen.{word}"
    for word in (
        "registry",
        "records",
        "manifest",
        "errors",
        "fields",
        "units",
        "yaml_document",
        "system.c_programs",
        "system.cache_directory",
        "system.clock",
        "system.endings",
        "system.host_names",
        "system.shadowing",
        "system.timer",
        "system.whole_file",
    )
]
# What a module may import of the other packages; the longest prefix of its name counts.
OUTSIDE: dict[str, list[str]] = {
    "slobench": ["loadgen"],
    "scenarios": [],
    "targets": WORDS,
    "reference_engine": WORDS,
    "reference_engine.__main__": [*WORDS, "loadgen.system.plugins"],
    "reports": [*WORDS, "loadgen.measure"],
    "loadgen": [],
    "loadgen.drive": [
        *(f"targets.{word}" for word in ("base", "route", "rotation", "dialer", "safe_text")),
    ],
    "loadgen.archive": ["targets.base", "targets.safe_text"],
    "loadgen.run": ["targets", "reports"],
    "loadgen.web": ["targets", "reports"],
    # The only rooms that import both the load generator and the engine.
    "loadgen.studies": ["targets", "reports", "reference_engine"],
    "loadgen.lab": ["targets", "reports", "reference_engine"],
    "loadgen.cli": [
        "reports",
        "targets.address",
        *(f"reference_engine.{name}" for name in ("serve", "serve_replicas")),
        "reference_engine.serving.serve_options",
    ],
}
# Rooms of the load generator that may import less than the rooms below them.
NARROW: dict[str, list[str]] = {
    "loadgen.workload": [
        *WORDS,
        *(f"loadgen.measure.{core}" for core in ("slo", "catalog", "prefix_hits", "statistics")),
    ],
    "loadgen.drive": [
        *WORDS,
        "loadgen.archive",
        "loadgen.system.plugins",
        "loadgen.workload.prompts",
        "loadgen.workload.dialogue",
        "loadgen.workload.more_units",
    ],
    "loadgen.exports": [*WORDS, "loadgen.measure", "loadgen.archive.checksums"],
    "loadgen.translate": [*WORDS, "loadgen.workload"],
    "loadgen.live": [
        *WORDS,
        "loadgen.drive.live_sample",
        "loadgen.measure",
        "loadgen.workload",
    ],
}
PURE = [
    "loadgen.workload",
    "loadgen.measure",
    "loadgen.foreign.foreign_run",
    "loadgen.foreign.build",
    "loadgen.foreign.aiperf",
    "loadgen.foreign.guidellm",
    "loadgen.foreign.sglang",
    "loadgen.foreign.vllm",
    "loadgen.foreign.change",
    "loadgen.foreign.inference_perf",
    "loadgen.foreign.locust",
    "loadgen.foreign.mlperf_endpoints",
    "targets.base",
    "targets.openai_chat",
    "targets.openai_completions",
    "targets.openai_responses",
    "targets.openai_wire",
    "targets.address",
    "targets.route",
    "targets.preflight_result",
    "targets.preflight_checks",
    "targets.mock_script",
    "targets.mock_wire",
    "targets.mock_named_events",
    "reference_engine.state.sequence",
    "reference_engine.state.kv",
    "reference_engine.state.plan",
    "reference_engine.policies",
    "reference_engine.smdp",
    "reference_engine.core.core",
    "reference_engine.core.interventions",
    "reference_engine.accounting.totals",
    "reference_engine.policy_testing.watched_policy",
    "reference_engine.state.cost_model",
    "reference_engine.accounting.explain",
    "reference_engine.simulator",
    "reference_engine.cluster",
    "loadgen.studies.capacity.probe",
    "loadgen.studies.capacity.traffic",
    "loadgen.studies.capacity.virtual_wait",
    "loadgen.studies.capacity.miss_law",
    "loadgen.studies.capacity.by_schedule",
    "loadgen.studies.capacity.result",
    "loadgen.studies.capacity.curve",
    "loadgen.studies.capacity.dispersion",
    "loadgen.studies.capacity.next_probe",
    "loadgen.studies.modes.seed_capacity",
    "loadgen.studies.nightly.machine_speed",
    "loadgen.studies.nightly.notes",
    "loadgen.studies.nightly.record",
    "loadgen.studies.nightly.result",
    "loadgen.studies.nightly.statistics",
    "loadgen.studies.nightly.values",
    "loadgen.studies.nightly.verdict",
    "loadgen.studies.compare.comparable",
    "loadgen.studies.compare.numbers",
    "loadgen.studies.compare.contrast",
    "loadgen.studies.compare.judgement",
    "loadgen.studies.compare.resampling",
    "loadgen.studies.compare.single_pair",
    "loadgen.studies.sweep.pareto",
    "loadgen.studies.size.demand",
    "loadgen.studies.size.result",
    "loadgen.studies.demo.figures",
    "loadgen.studies.demo.result",
    "loadgen.studies.demo.view",
    "loadgen.studies.claims.claim",
    "loadgen.studies.claims.numbers",
    "loadgen.studies.claims.result",
    "loadgen.studies.claims.view",
    "loadgen.studies.tune.halving",
    "loadgen.studies.tune.result",
    "loadgen.studies.tune.view",
    "loadgen.studies.solve.result",
    "loadgen.studies.solve.service_times",
    "reference_engine.policy_testing.policy_workloads",
    "reference_engine.executors.simulated",
    "reference_engine.executors.delayed",
    "reference_engine.accounting.ledger",
    "reference_engine.state.queues",
    "reference_engine.state.steps",
    "reference_engine.state.batch",
    "reference_engine.core.placement",
    "reference_engine.accounting.accounting",
    "reference_engine.accounting.displacement",
    "reference_engine.attribution.attribution",
    "reference_engine.core.setup",
    "reference_engine.attribution.counterfactual",
    "reference_engine.step_log.log_replay",
    "reference_engine.core.commit",
    "reference_engine.state.swap",
    "reference_engine.predict",
    "reference_engine.serving.wire",
    "reference_engine.metrics.metrics",
    "reference_engine.metrics.exposition",
    "reports.run.failures",
    "reports.run.frames",
    "reports.charts",
    "loadgen.studies.capacity.charts",
    "loadgen.studies.capacity.view",
    "loadgen.studies.compare.charts",
    "loadgen.studies.compare.view",
    "reports.run.spectra",
    "loadgen.studies.sweep.charts",
    "loadgen.studies.sweep.view",
    "loadgen.studies.nightly.view",
    "loadgen.studies.nightly.charts",
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


@cache
def imports(path, types=False):
    """The modules that a file imports at any depth; with `types` also under TYPE_CHECKING."""
    names = []
    tree = ast.parse(path.read_text())
    for node in list(ast.walk(tree)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module in OURS:
                words = [alias.name for alias in node.names if alias.name != "__version__"]
                names += [f"{node.module}.{word}" for word in words]
            elif node.module:
                names.append(node.module)
                words = [f"{node.module}.{alias.name}" for alias in node.names]
                names += [name for name in words if is_module(name)]
    return names


def is_module(name):
    return (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


def is_under(module, prefix):
    return module == prefix or module.startswith(prefix + ".")


def longest(table, module):
    """The longest prefix of a module's name among the keys of a table."""
    return max((name for name in table if is_under(module, name)), key=len, default=None)


def floor(module):
    """(package, line of ROOMS) of a module of a package with rooms; (package, 0) elsewhere."""
    package, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    lines = [line.split() for line in ROOMS.get(package, [])]
    if not lines or not room:
        return package, 0
    numbers = [k for k, line in enumerate(lines) if room in line]
    assert len(numbers) == 1, f"{module}: {room} is on {len(numbers)} lines of ROOMS"
    return package, numbers[0]


def room_of(module):
    return ".".join(module.split(".")[:2])


def test_each_import_is_allowed():
    wrong = []
    for module, path in modules():
        if path.name == "__init__.py":
            if imports(path):
                wrong.append(f"{path}: an __init__.py holds its docstring and nothing else")
            continue
        package, line = floor(module)
        for imported in {name for name in imports(path) if name.split(".")[0] in OURS}:
            if imported.split(".")[0] != package:
                allowed = OUTSIDE[longest(OUTSIDE, module)]
                is_allowed = any(is_under(imported, name) for name in allowed)
            elif room_of(imported) == room_of(module) or package not in ROOMS:
                is_allowed = True
            else:
                narrow = NARROW.get(room_of(module), [package])
                is_allowed = floor(imported)[1] > line
                is_allowed &= any(is_under(imported, name) for name in narrow)
            if not is_allowed:
                wrong.append(f"{module} may not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_each_room_of_the_table_exists():
    for package, lines in ROOMS.items():
        for room in " ".join(lines).split():
            place = ROOT / package / room
            assert place.is_dir() or place.with_suffix(".py").is_file(), f"{package}.{room}"


def circle(arrows):
    """The nodes of a circle of a graph {node: its successors}, the first again at the end."""
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_rooms_floors_and_arrows_of_the_load_generator_stay_few():
    """A room that does not fit into these figures joins a room that exists."""
    arrows: dict[str, set[str]] = {}
    for module, path in modules():
        if is_under(module, "loadgen") and module != "loadgen":
            rooms = {room_of(name) for name in imports(path, types=True)}
            rooms = {room for room in rooms if is_under(room, "loadgen")}
            arrows.setdefault(room_of(module), set()).update(rooms - {room_of(module)})
    height: dict[str, int] = {}
    for room in TopologicalSorter(arrows).static_order():
        height[room] = 1 + max((height[below] for below in arrows[room]), default=0)
    assert len(arrows) <= 26
    assert max(height.values()) <= 11
    assert sum(map(len, arrows.values())) <= 134


def test_no_files_import_each_other_in_a_circle():
    files = {module for module, path in modules() if path.name != "__init__.py"}
    arrows = {}
    for module, path in modules():
        names = set(imports(path, types=not is_under(module, "reference_engine")))
        arrows[module] = (names & files) - {module}
    assert not circle(arrows), circle(arrows)


STUDIES = {path.name for path in (ROOT / "loadgen" / "studies").iterdir() if path.is_dir()}


def test_each_study_has_one_room():
    """No module or folder outside of a study's own bears its name or part of it."""
    assert {"capacity", "compare", "nightly", "sweep"} < STUDIES
    elsewhere = [
        module
        for module, _ in modules()
        if not is_under(module, "loadgen.studies") and STUDIES & set(module.split("."))
    ]
    assert not elsewhere, elsewhere


def test_no_lower_room_imports_a_study():
    """Also not by name, apart from the verbs, files and results that the command line lists."""
    rooms = ("lazy_verbs", "output_schemas", "study_files")
    listed = {*(f"loadgen.cli.{room}" for room in rooms), "slobench"}
    for module, path in modules():
        if not is_under(module, "loadgen.studies") and module not in listed:
            assert "loadgen.studies" not in path.read_text(), module


def test_pure_modules_import_no_clock_randomness_or_socket():
    wrong = []
    for module, path in modules():
        roots = {name.split(".")[0] for name in imports(path)}
        if any(is_under(module, name) for name in PURE):
            wrong += [f"{module} imports {name}" for name in sorted(roots & IMPURE)]
        if "torch" in roots and not module.startswith(TORCH_IN):
            wrong.append(f"{module} imports torch")
    assert not wrong, "\n".join(wrong)


def test_each_pure_module_exists():
    names = {module for module, _ in modules()}
    assert [name for name in PURE if name not in names] == []


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
        *("loadgen.measure.per_request", "loadgen.measure.statistics", "targets.embed", "numpy.ma"),
        *("targets.launch", "targets.mock_script"),
    },
    "loadgen.drive.shard": {
        *("aiohttp", "pyarrow", "pandas", "scipy", "jinja2", "rich", "typer", "yaml"),
        *("reports", "loadgen.workload.scenario", "targets.endpoint"),
        *("loadgen.measure.aggregate", "loadgen.measure.per_request", "loadgen.measure.statistics"),
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
    for name in (
        "locust_beside",
        "locust_events",
        "locustfile",
        "locust_master",
        "locust_worker",
        "locust_page",
        "locust_start",
        "guarded_rpc",
    )
}


def test_locust_is_imported_in_its_own_processes_only():
    for module, path in modules():
        names = set(imports(path))
        patching = {name.split(".")[0] for name in names} & {"locust", "gevent", "flask"}
        assert not patching or module in GEVENT, f"{module} imports {patching}"
        assert module in GEVENT or not GEVENT & names, f"{module} imports {GEVENT & names}"


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
