"""The step core in C makes the decisions of the Python core, to the last bit of every instant."""

import random
import re
import subprocess
from dataclasses import astuple

import numpy as np
import pytest
from rich.console import Console

from loadgen.errors import MissingDependency, UsageError
from loadgen.lab.compiled_core import chosen_core, library
from loadgen.lab.open_loop import OpenLoop
from loadgen.lab.prompt_ids import PromptIds
from loadgen.lab.sim_options import sim_options
from loadgen.lab.simulate import record
from loadgen.lab.simulated_engine import build
from loadgen.lab.virtual_client import VirtualClient
from loadgen.records import FIRST_PIECE, PIECES
from loadgen.system.c_programs import find_compiler
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import make_plan
from reference_engine.model.hardware_file import write_calibrated
from reference_engine.state.cost_model import MeasuredSteps, NotMeasured, StepCost
from reference_engine.state.step_variation import StepVariation, VaryingSteps
from reference_engine.step_core.library import PROGRAM, WHYS, Status, step_core

QUIET = Console(quiet=True)
_TICKS_PER_S = 1 << 40


@pytest.fixture(scope="module")
def core_path():
    try:
        return library()
    except MissingDependency as error:
        pytest.skip(str(error))


class Watched(VirtualClient):
    """Keeps the preemptions and the waits (ticks by cause) of each answered row."""

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.accounts = {}

    def _answered(self, request, finish, now_s):
        assert self._engine is not None, "the engine acts first"
        account, waits = self._engine.explain(request.id), {why.name: 0 for why in WHYS}
        assert account is not None, f"{request.id} left no account"
        for cause, seconds in account.waits:
            waits[cause.why.name] += round(seconds * _TICKS_PER_S)
        self.accounts[self._row[request]] = (request.n_preemptions, *waits.values())
        super()._answered(request, finish, now_s)


def random_settings(draw):
    modes = ["chunked", "continuous", "orca", "split_fuse", "prefill_first", "static", "dynamic"]
    mode = draw.choice(modes)
    settings = {"mode": mode, "hardware": draw.choice(["h200", "2xh100", "a100"])}
    may_have: dict[str, list[object]] = {
        "max_num_seqs": [1, 3, 8, 32],
        "kv_blocks": [80, 120, 300],
        "block_tokens": [1, 8, 64],
        "step_delay": ["10%", "2ms"],
        "declared_max_tokens": [50, 400],
        "max_model_len": [300, 1000],
        "fused_attention": ["90%"],
        "kv_dtype": ["fp8"],
    }
    of_mode: dict[str, dict[str, list[object]]] = {
        "chunked": {
            "token_budget": [1, 7, 64, 512],
            "reserve": ["watermark", "prompt", "max"],
            "watermark": [0, 0.2],
            "long_prefill_tokens": [5, 100],
        },
        "continuous": {"reserve": ["watermark", "prompt", "max"], "watermark": [0, 0.2]},
        "split_fuse": {"token_budget": [7, 64, 512], "pad": ["budget"]},
        "prefill_first": {"max_num_batched_tokens": [10, 300, 4000]},
        "static": {
            "batch_size": [1, 4],
            "fill_timeout": ["0s", "20ms", "2s"],
            "finished_rows": ["dropped"],
            "pad": ["none"],
            "answers": ["streamed"],
        },
        "dynamic": {
            "max_batch_size": [1, 4],
            "max_delay": ["0s", "20ms", "1s"],
            "preferred_sizes": ["2 4", "3"],
            "pad_to": ["2 4 8"],
            "finished_rows": ["dropped"],
            "pad": ["none"],
            "answers": ["at_end"],
        },
    }
    for name, values in (may_have | of_mode.get(mode, {})).items():
        if draw.random() < 0.4:
            settings[name] = draw.choice(values)
    if draw.random() < 0.6:
        routers = ["rr", "random", "jsq", "p2c", "least_kv", "jsq:stale=50ms"]
        settings["replicas"] = draw.choice(["2", "3", "8", "2+2:hardware=a100"])
        settings["router"] = draw.choice([*routers, "power_of_two:choices=3"])
        settings["router_seed"] = draw.randrange(9)
    return settings


def random_scenario(draw):
    rate = draw.choice([8, 20, 80, 300])
    scenario = {
        "name": "drawn",
        "seed": draw.randrange(1 << 20),
        "arrivals": draw.choice(
            [
                {"kind": "poisson", "rate": f"{rate}/s"},
                {"kind": "constant", "rate": "20/s"},
                {"kind": "gamma", "rate": "40/s", "cv": 3},
            ]
        ),
        "requests": {
            "input_tokens": {
                "kind": "lognormal",
                "median": draw.choice([20, 200, 600]),
                "sigma": 1.0,
                "max": draw.choice([400, 4000]),
            },
            "output_tokens": {
                "kind": "lognormal",
                "median": draw.choice([3, 40, 150]),
                "sigma": 0.8,
                "max": 600,
            },
        },
        "phases": {
            "warmup": "1s",
            "measure": draw.choice(["2s", "4s"]),
            "drain": draw.choice(["0s", "2s", "60s"]),
        },
        "limits": {
            "timeout": draw.choice(["300ms", "2s", "60s"]),
            "max_concurrency": draw.choice([5, 60, 2000]),
        },
    }
    if draw.random() < 0.4:
        scenario["stop_when"] = {"error_rate": draw.choice([0.2, 0.6]), "over": "500ms"}
        if draw.random() < 0.5:
            scenario["stop_when"]["saturated"] = "1s"
    return Scenario.model_validate(scenario)


def two_tenants(scenario):
    """The scenario with its requests in two classes, each of a tenant."""
    values = scenario.resolved()
    own = {"arrivals": values.pop("arrivals"), "requests": values.pop("requests")}
    values["classes"] = {"first": {**own, "tenant": "a"}, "second": {**own, "tenant": "b"}}
    return scenario.with_values(values)


def with_texts(draw, plan):
    """The plan with prompts that begin with texts of a drawn tree, or with a plain prefix."""
    schedule, n = plan.schedule.copy(), draw.choice([2, 6, 40])
    pieces = np.zeros(n, PIECES)
    paths = dict[int, int]()  # tokens up to the end of each piece
    for k in range(n):
        after = draw.choice([0, *paths]) if draw.random() < 0.8 else 0
        n_tokens = draw.choice([1, 5, 16, 17, 64, 200])
        pieces[k] = (after, n_tokens)
        paths[FIRST_PIECE + k] = paths.get(after, 0) + n_tokens
    for row in schedule:
        if draw.random() < 0.1:
            continue
        if draw.random() < 0.2:
            row["prefix_id"], row["prefix_tokens"] = draw.choice([1, 2]), draw.choice([30, 64])
            continue
        text, n_shared = draw.choice(list(paths.items()))
        n_shared -= draw.choice([0, 0, min(3, n_shared - 1)])
        row["prefix_id"], row["prefix_tokens"] = text, n_shared
        row["input_tokens"] = n_shared + draw.choice([0, 1, 15, 16, 100])
    return plan._replace(schedule=schedule, pieces=pieces)


def calibrated(draw, folder):
    """A file of drawn costs that hold up to drawn sizes of steps."""
    most = draw.choice([(300, 10**5), (4000, 3 * 10**5), (1 << 20, 10**9)])
    prompts = ((1, draw.choice([2, 300])), (1, most[0]), (0, 1e12))
    decodes = ((draw.choice([1, 4]), 500), (9, most[1]))
    measured = [
        MeasuredSteps("prompt", *prompts),
        MeasuredSteps("decode", (0, 0), (0, 0), (0, 0), *decodes),
        MeasuredSteps("mixed", *prompts, *decodes),
    ]
    cost = StepCost(
        step_s=1e-3,
        seq_s=1e-5,
        token_s=2e-6,
        context_token_s=3e-9,
        prefill_attention_s=1e-10,
        prefill_seq_s=draw.choice([0.0, 1e-5]),
        weights_s=draw.choice([0.0, 3e-3]),
        added_token_s=1e-7,
        row_s=draw.choice([0.0, 2e-6]),
        sharpness=draw.choice([1.7, 4.0]),
        graph_rows=draw.choice([(), (1, 2, 4, 8), (16, 256)]),
        seq_pieces=draw.choice([(), ((1, 1e-4), (4, 3e-5), (16, 1e-5))]),
        measured=tuple(measured[: draw.choice([2, 3, 3, 3, 3])]),
    )
    variation = StepVariation((0.5, 1.0), (0.9, 1.2), 0.4, 20.0, 0.01, (0.01, 0.02))
    path = folder / "calibrated.yaml"
    facts = {"name": "box", "model": "8b", "kv_tokens": 200_000}
    write_calibrated(path, cost, None, facts, draw.choice([None, variation]))
    return str(path)


def random_case(draw, folder):
    """A scenario, settings of the engine and a plan; half of them with prefix caches, and some with
    the costs of a file in `folder`."""
    scenario, settings = random_scenario(draw), random_settings(draw)
    if draw.random() < 0.3:
        settings = {key: value for key, value in settings.items() if key != "kv_dtype"}
        settings["hardware"] = calibrated(draw, folder)
    if draw.random() < 0.5:
        return scenario, settings, make_plan(scenario)
    if draw.random() < 0.5:
        scenario = two_tenants(scenario)
    if draw.random() < 0.3:
        settings["block_tokens"] = draw.choice([1, 5, 16])
    return scenario, settings, with_texts(draw, make_plan(scenario))


def unchanged(engine):
    pass


def compiled(scenario, plan, options, change=unchanged):
    """The client and the totals of a run on the step core, with an account for each request."""
    engine = build(options, PromptIds(plan).is_sharing)
    change(engine)
    client = OpenLoop(scenario, plan, options.declared_max_tokens)
    n = len(plan.schedule)
    client.traffic.account = np.arange(n, dtype=np.int32)
    client.traffic.waits = np.zeros((n, len(WHYS)), np.int64)
    chosen = chosen_core(scenario, plan, options, engine)
    rng = np.random.default_rng(options.cluster.router_seed)
    with step_core(chosen.path, client.traffic, chosen.engines, chosen.router, rng) as core:
        assert client.run(core, lambda: None) is Status.done
        totals, now_s = list(core.totals()), core.now_s
    tables = client.tables([replica.state for replica in engine.simulator.replicas])
    return client, tables, totals, now_s


def in_python(scenario, plan, options, change):
    engine = build(options, PromptIds(plan).is_sharing)
    change(engine)
    kv = engine.simulator.replicas[0].state.kv
    block_tokens = kv.block_tokens if kv.prefix_cache else None
    client = Watched(scenario, plan, options.declared_max_tokens, block_tokens=block_tokens)
    engine.simulator.run(client)
    return client, client.tables(), engine.simulator


def assert_equal(scenario, settings, change=unchanged, plan=None):
    """Both cores give the same run, or the same refusal, on engines after `change`. Returns the
    number of preemptions."""
    plan, options = plan or make_plan(scenario), sim_options(settings)
    try:
        client, (rows, chunks, names), totals, now_s = compiled(scenario, plan, options, change)
    except NotMeasured as error:
        with pytest.raises(NotMeasured, match=re.escape(str(error))):
            in_python(scenario, plan, options, change)
        return 0
    oracle, (expected, their_chunks, their_names), simulator = in_python(
        scenario, plan, options, change
    )
    for column in rows.dtype.names:
        if column != "error_id":
            np.testing.assert_array_equal(rows[column], expected[column], err_msg=column)
    texts = [names.errors[k] for k in rows["error_id"]]
    assert texts == [their_names.errors[k] for k in expected["error_id"]]
    assert chunks.tobytes() == their_chunks.tobytes()
    assert (client.ended, now_s) == (oracle.ended, simulator.now_s)
    for replica, total in zip(simulator.replicas, totals, strict=True):
        counted = replica.totals
        assert astuple(total) == (
            *(replica.n_received, counted.steps, counted.preemptions, counted.padding_tokens),
            *(counted.output_tokens, counted.cached_tokens),
            *(replica.population.request_s(now_s), replica.busy_s),
        )
    traffic = client.traffic
    place = {int(row): k for k, row in enumerate(client._order)}
    for row, account in oracle.accounts.items():
        k = place[row]
        assert (traffic.n_preempted[k], *traffic.waits[k].tolist()) == account, f"row {row}"
    return sum(total.n_preemptions for total in totals)


@pytest.mark.parametrize("first", range(0, 80, 10))
def test_both_cores_give_the_same_run(core_path, first, tmp_path):
    """80 drawn settings and scenarios: KV short, prefix caches, costs of a calibration, timeouts,
    refusals, drops, all covered routers."""
    for seed in range(first, first + 10):
        scenario, settings, plan = random_case(random.Random(f"compiled core {seed}"), tmp_path)
        assert_equal(scenario, settings, plan=plan)


def crowd(**limits):
    return Scenario.model_validate(
        {
            "name": "crowd",
            "arrivals": {"kind": "poisson", "rate": "60/s"},
            "requests": {"input_tokens": 300, "output_tokens": 100},
            "phases": {"warmup": "0s", "measure": "3s"},
            "limits": limits,
        }
    )


@pytest.mark.parametrize(
    "mode",
    [{"mode": "chunked", "token_budget": 200}, {"mode": "continuous"}, {"mode": "split_fuse"}],
)
def test_preemptions_are_those_of_the_python_core(core_path, mode):
    settings = {**mode, "kv_blocks": 100, "watermark": 0}
    assert assert_equal(crowd(), settings) > 10


def test_prompts_that_find_no_memory_let_the_decodes_go_on(core_path):
    settings = {"mode": "prefill_first", "max_num_batched_tokens": 100, "watermark": 0}
    assert assert_equal(crowd(), {**settings, "kv_blocks": 60, "max_model_len": 500}) > 20


@pytest.mark.parametrize("fate", [{"timeout": "1500ms"}, {"timeout": "5s"}])
@pytest.mark.parametrize("replicas", ["1", "3"])
def test_answers_that_are_held_are_delivered_or_cancelled_together(core_path, fate, replicas):
    settings = {"mode": "static", "batch_size": 8, "kv_blocks": 400, "replicas": replicas}
    assert_equal(crowd(**fate), settings)


def test_steps_vary_by_the_draws_of_the_python_core(core_path):
    variation = StepVariation((0.5, 1.0), (0.9, 1.1), 0.4, 20.0, 0.01, (0.01, 0.02))
    settings = {"mode": "chunked", "replicas": "2", "router": "jsq"}

    def vary(engine):
        for replica in engine.simulator.replicas:
            replica.executor.varying = VaryingSteps(variation, replica.number)

    assert_equal(crowd(), settings, vary)


def test_a_step_outside_the_measured_sizes_is_refused_when_it_comes(core_path, tmp_path):
    """Prompts of 300 tokens are within the sizes of a step, and more than 15 decodes of up to 400
    tokens of context are not."""
    prompts, decodes = ((1, 9), (1, 400), (0, 1e6)), ((1, 99), (1, 5000))
    measured = (
        MeasuredSteps("prompt", *prompts),
        MeasuredSteps("decode", (0, 0), (0, 0), (0, 0), *decodes),
        MeasuredSteps("mixed", *prompts, *decodes),
    )
    cost = StepCost(step_s=2e-3, token_s=1e-5, seq_s=1e-5, measured=measured)
    path = tmp_path / "box.yaml"
    write_calibrated(path, cost, None, {"name": "box", "model": "8b", "kv_tokens": 90_000})
    settings = {"hardware": str(path), "max_num_seqs": 64, "token_budget": 400}
    with pytest.raises(NotMeasured, match=r"step of 5\d\d\d tokens of context"):
        engine_section(crowd(), settings)
    assert_equal(crowd(), settings)
    few = {**settings, "max_num_seqs": 12}
    assert engine_section(crowd(), few).core == "compiled"
    assert_equal(crowd(), few)


def test_pieces_of_the_cost_are_added_in_the_order_of_python(core_path):
    cost = StepCost(
        *(1e-3, 2e-6, 1e-7, 3e-3, 1e-6, 5e-7, 3e-9, 1e-10, 1e-4, 1e-7, 1e-5, 2e-6),
        sharpness=3.0,
        graph_rows=(1, 2, 8),
        seq_pieces=((1, 1e-4), (4, 3e-5), (16, 1e-5)),
    )

    def price(engine):
        for replica in engine.simulator.replicas:
            replica.executor.cost = cost

    assert_equal(crowd(), {"mode": "split_fuse", "pad": "budget"}, price)


def test_a_stopped_run_ends_at_the_same_check(core_path):
    scenario = crowd(timeout="100ms")
    stop = {"error_rate": 0.3, "over": "1s"}
    scenario = scenario.with_values({**scenario.resolved(), "stop_when": stop})
    plan, options = make_plan(scenario), sim_options({"kv_blocks": 60})
    client, *_ = compiled(scenario, plan, options)
    assert client.ended[0] == "stopped"
    assert_equal(scenario, {"kv_blocks": 60})


def engine_section(scenario, settings, console=QUIET):
    run = record(scenario, make_plan(scenario), sim_options(settings), console)
    assert run.manifest.engine is not None
    return run.manifest.engine


def test_the_result_names_the_core(core_path):
    chosen: list[dict[str, object]] = [{}, {"core": "python"}]
    chosen += [{"mode": "sjf"}, {"prefix_cache": True, "host_memory": "40e9"}]
    assert [engine_section(crowd(), settings).core for settings in chosen] == [
        "compiled",
        "python: core=python",
        "python: the mode sjf",
        "python: KV in host memory",
    ]


def test_the_counters_of_both_cores_are_equal(core_path):
    settings = {"replicas": "3", "router": "jsq", "kv_blocks": 100}
    ours, theirs = (
        engine_section(crowd(), {**settings, "core": core}) for core in ("auto", "python")
    )
    assert ours.core == "compiled"
    for name in ("steps", "preemptions", "waits_s", "simulated_s", "replicas"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_without_a_compiler_python_simulates_with_a_note(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    assert (
        engine_section(crowd(), {}, Console(width=400)).core
        == "python: no compiled simulator on this machine"
    )
    assert capsys.readouterr().out.count("CC=no-such-compiler is not installed") == 1


def random_dialogue(draw, folder):
    """A scenario in which requests wait for others, for a slot, or are cancelled on purpose."""
    scenario, settings, _ = random_case(draw, folder)
    values = scenario.resolved()
    kind = draw.choice(["users", "sessions", "chain", "slots", "cancels", "count"])
    own = next(iter(values["classes"].values())) if values.get("classes") else values
    requests = own["requests"]
    if draw.random() < 0.3:
        requests["shared_prefix"] = {"tokens": draw.choice([30, 200]), "groups": 3}
    pause = draw.choice(["0s", "30ms", {"kind": "exponential", "mean": "200ms"}])
    if kind == "users":
        values.pop("classes", None)
        users = {"kind": "users", "users": draw.choice([1, 5, 40]), "think": pause}
        values |= {"arrivals": users, "requests": requests}
    elif kind == "sessions":
        context = draw.choice(["real", "scripted"])
        turns = {"kind": "uniform", "min": 1, "max": 5}
        own["session"] = {"turns": turns, "think": pause, "context": context}
    elif kind == "chain":
        own["chain"] = [
            {"name": "plan", "requests": requests},
            {"name": "read", "after": ["plan"], "think": pause, "requests": requests},
            {"name": "ask", "after": ["plan"], "requests": requests},
            {"name": "join", "after": ["read", "ask"], "requests": requests},
        ]
        del own["requests"]
    elif kind == "slots":
        values["limits"] |= {"when_full": "wait", "max_concurrency": draw.choice([1, 6, 40])}
    elif kind == "count":
        values["phases"] = {"warmup": "500ms", "requests": 40, "at_most": "4s", "drain": "2s"}
    if kind == "cancels" or draw.random() < 0.3:
        after = {"kind": "exponential", "mean": draw.choice(["50ms", "1s"])}
        for part in own.get("chain", [own]):
            part["requests"] = {**part["requests"], "cancel": {"share": 0.3, "after": after}}
    if draw.random() < 0.5:
        settings["prefix_cache"] = True
    return scenario.with_values(values), settings


def both(scenario, settings):
    """The runs on both cores, and the error of either, without what may differ."""
    plan, results = make_plan(scenario), list[object]()
    for core in ("auto", "python"):
        try:
            run = record(scenario, plan, sim_options({**settings, "core": core}), QUIET)
        except NotMeasured as error:
            results.append(str(error))
            continue
        engine = run.manifest.engine
        assert engine is not None
        assert engine.core == ("compiled" if core == "auto" else "python: core=python")
        rows = {
            name: run.request_rows[name].tolist() for name in run.request_rows.dtype.names or ()
        }
        rows["error"] = [run.names.errors[k] for k in rows.pop("error_id")]
        counts = (engine.simulated_s, engine.steps, engine.preemptions, engine.waits_s)
        ended = (run.manifest.ended, run.manifest.end_reason, run.manifest.window)
        results.append((repr(rows), run.chunk_rows.tobytes(), counts, engine.replicas, ended))
    return results


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_both_cores_give_the_same_dialogues(core_path, first, tmp_path):
    """40 drawn scenarios with closed loops, sessions, chains, slots and cancellations."""
    for seed in range(first, first + 10):
        compiled_run, python_run = both(
            *random_dialogue(random.Random(f"dialogue {seed}"), tmp_path)
        )
        assert compiled_run == python_run, f"seed {seed}"


def test_a_group_of_replicas_has_no_core_of_its_own():
    with pytest.raises(UsageError, match="a setting of all replicas together"):
        sim_options({"replicas": "1+1:core=python"})


def test_the_c_code_of_the_core_has_no_warnings(core_path):
    files = sorted(map(str, PROGRAM.sources.glob("*.c")))
    command = [*find_compiler("", PROGRAM.what), *PROGRAM.flags[:2], "-fsyntax-only"]
    command += ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", *files]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.stderr == ""
