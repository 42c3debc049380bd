"""Runs of a scenario in virtual time: the plan, release rule and tables of a real run, with a
simulated engine in place of a server."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
import numpy as np
from rich.console import Console

from loadgen.archive import checksums, store
from loadgen.archive.directory import run_directory
from loadgen.errors import MissingDependency, UsageError
from loadgen.lab.compiled_core import GIVEN_UP, ChosenCore, NotCovered, chosen_core
from loadgen.lab.compiled_service import CompiledService, traffic_of
from loadgen.lab.open_loop import OpenLoop
from loadgen.lab.prompt_ids import PromptIds
from loadgen.lab.sim_options import SimOptions, read_settings, sim_options
from loadgen.lab.simulated_engine import SimulatedEngine, build
from loadgen.lab.virtual_client import VirtualClient
from loadgen.live.progress import Progress
from loadgen.manifest.sections import (
    FailureSection,
    HostMemorySection,
    LabelsSection,
    PreflightLine,
    ReplicaSection,
    ScalingSection,
    SimulatedEngineSection,
    TargetSection,
    TransferSection,
)
from loadgen.measure.attainment import derived, with_counted_window
from loadgen.measure.closed_loop import with_start_left_out
from loadgen.records import Chunks, Names, Requests, Run
from loadgen.run.execute import VIRTUAL_TIME, Opener, Record
from loadgen.run.manifest import completed, manifest
from loadgen.run.run_options import Early, RunSetup
from loadgen.run.shown_run import ShownRun, shown
from loadgen.system.endings import ending_signals
from loadgen.workload.flag_values import KEYWORDS, scenario_of
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, make_plan
from reference_engine.accounting.totals import EngineTotals
from reference_engine.cluster.kv_links import KvLinks
from reference_engine.cluster.transfers import Transfers
from reference_engine.policies.base import Policy
from reference_engine.simulator import PipelinedReplica, Replica, Simulator
from reference_engine.step_core.library import Status, step_core

if TYPE_CHECKING:
    from reports.run.engine_section import EngineSection

_BEAT_S = 0.25  # real time between two updates of the progress


class Simulated(Opener):
    """`--target sim`: the bundled engine in virtual time."""

    kind: ClassVar[str] = "sim"

    @contextlib.contextmanager
    def open(self, setup: RunSetup) -> Iterator[Record]:
        options = setup.options
        if options.model:
            raise UsageError("--model names a server's model; with sim use --engine shape=…")
        if options.target_settings:
            raise UsageError(
                f"target setting {options.target_settings[0]}: sim has no target file; set "
                "the engine with --engine"
            )
        if options.watch is not None:
            raise UsageError(VIRTUAL_TIME)
        settings = sim_options(read_settings(options.engine))
        yield lambda: record(
            setup.scenario,
            setup.plan,
            settings,
            setup.console,
            directory=setup.directory,
            command=options.command,
            name=options.name,
            early=options.early,
            min_requests=options.min_requests,
        )

    def engine_section(
        self, directory: Path, run: Run, is_own_slo: bool = True
    ) -> EngineSection | None:
        from loadgen.lab.engine_report import engine_section

        return engine_section(directory, run, is_own_slo)


class ReplicaCounts(NamedTuple):
    """The counts of a replica; `request_s` is the time (s) that requests were present, summed,
    `busy_s` that of its steps."""

    totals: EngineTotals
    n_received: int
    request_s: float
    busy_s: float


@dataclass(frozen=True)
class SimTarget:
    """The description of a simulated engine as the target of a run's manifest."""

    options: SimOptions
    policy: Policy
    checks: Sequence[PreflightLine] = ()

    def to_manifest(self) -> TargetSection:
        options = self.options
        chosen = {**options.given(), **options.policy_args}
        chosen.pop("policy_args", None)
        flags = {"mode": self.policy.kind, **chosen}
        return TargetSection(
            kind="sim",
            url=f"sim://{options.hardware}/{options.shape}",
            model=options.shape,
            api_key_env=None,
            policy={"kind": self.policy.kind, **self.policy.model_dump(mode="json")},
            labels=LabelsSection(
                engine="simulated",
                gpu=options.hardware,
                gpus=options.n_gpus if options.n_gpus > 1 else None,
                flags=" ".join(f"{key}={value}" for key, value in flags.items()),
            ),
        )


def simulate(
    scenario: Scenario | Path | str,
    policy: Policy | None = None,
    out_dir: Path | str | None = None,
    **settings: Any,
) -> ShownRun:
    """Runs a scenario on a simulated engine; no request is sent.

    `policy` is a batching mode as an object, otherwise `mode` names one; further settings are those
    of `--engine` (`shape`, `hardware`, `token_budget`, …, and the mode's own), and flags on the
    scenario (`rate`, `slo`, …). With `out_dir` the run is also written there. Raises UsageError for
    invalid settings.
    """
    flags = {name: settings.pop(name) for name in KEYWORDS if name in settings}
    chosen = scenario_of(scenario, flags)
    options = sim_options(settings)
    console = Console(quiet=True)
    if out_dir is None:
        return shown(record(chosen, make_plan(chosen), options, console, policy=policy), None)
    from loadgen.run.conclude import summarized

    with run_directory(chosen.name, Path(out_dir), force=False) as directory:
        plan = make_plan(chosen)
        run = record(chosen, plan, options, console, policy=policy, directory=directory)
        summarized(run, directory, None, None, None)
        checksums.cover_rest(directory)
    return shown(run, directory)


def record(
    scenario: Scenario,
    plan: Plan,
    options: SimOptions,
    console: Console,
    *,
    policy: Policy | None = None,
    directory: Path | None = None,
    command: Sequence[str] = (),
    name: str = "",
    early: Early | None = None,
    min_requests: int = 0,
    is_interruptible: bool = True,
) -> Run:
    """Sends a plan to a simulated engine; with a `directory` the run is written into it and,
    without a `name`, named after it.

    `early` may end the run. Ctrl-C ends an interruptible run as `interrupted`, with all results so
    far.
    """
    engine = build(options, PromptIds(plan).is_sharing, policy)
    console.print(f"simulated engine: {engine.description}", soft_wrap=True, markup=False)
    target = SimTarget(options, engine.policy)
    name = name or (scenario.name if directory is None else directory.name)
    started_utc = datetime.now(UTC)
    planned = manifest(name, scenario, plan, target, b"", command)
    planned = msgspec.structs.replace(planned, min_requests=min_requests)
    simulation = _Simulation(scenario, plan, options, engine, console, early)
    with simulation.interruptible() if is_interruptible else contextlib.nullcontext():
        simulation.run(lambda: build(options, PromptIds(plan).is_sharing, policy))
    requests, chunks, found = simulation.tables()
    how, reason, ended_s = simulation.client.ended
    done = completed(planned, scenario, how, reason, ended_s, 0, 0, started_utc)
    done = msgspec.structs.replace(done, clock="virtual", engine=simulation.engine_section())
    names = replace(scenario.names(), errors=found.errors)
    recorded = Run(done, plan.schedule, requests, chunks, plan.edges, names, piece_rows=plan.pieces)
    run = with_start_left_out(with_counted_window(recorded))
    if directory is not None:
        store.write_schedule(directory, run)
        store.write_run(directory, run, derived(run))
    return run


def _counts(engine: SimulatedEngine) -> list[ReplicaCounts]:
    """The counts of replicas that the Python core simulated."""
    now_s = engine.simulator.now_s
    return [
        ReplicaCounts(
            replica.totals, replica.n_received, replica.population.request_s(now_s), replica.busy_s
        )
        for replica in engine.simulator.replicas
    ]


def _sections(
    engine: SimulatedEngine, counts: Sequence[ReplicaCounts], simulated_s: float
) -> tuple[ReplicaSection, ...]:
    simulator, wiring = engine.simulator, engine.wiring
    now_s = max(simulated_s, 1e-9)
    links = KvLinks(1.0) if wiring.transfers is None else wiring.transfers.links
    on_s: dict[Replica, float] = {}
    for scaling in wiring.scaling:
        on_s |= scaling.totals_s(simulator.now_s)
    sections: list[ReplicaSection] = []
    for replica, count in zip(simulator.replicas, counts, strict=True):
        section = ReplicaSection(
            name=replica.name,
            requests=count.n_received,
            mean_requests=count.request_s / now_s,
            busy_share=count.busy_s / now_s,
            steps=count.totals.steps,
            preemptions=count.totals.preemptions,
            cached_tokens=count.totals.cached_tokens,
            role=replica.role,
            sent_kv_bytes=links.sent_bytes.get(replica.number, 0.0),
            received_kv_bytes=links.received_bytes.get(replica.number, 0.0),
            link_share=links.busy_s.get(replica.number, 0.0) / now_s,
            failures=replica.n_failures,
            on_share=on_s.get(replica, now_s) / now_s,
            bubble_share=_bubble_share(replica),
        )
        sections.append(section)
    return tuple(sections)


def _bubble_share(replica: Replica) -> float | None:
    return replica.stages.bubble_share if isinstance(replica, PipelinedReplica) else None


def _host_section(simulator: Simulator) -> HostMemorySection | None:
    out_bytes = back_bytes = copying_s = 0.0
    for replica in simulator.replicas:
        totals = replica.totals
        block_bytes = replica.kv_token_bytes * replica.state.kv.block_tokens
        out_bytes += totals.copied_out_blocks * block_bytes
        back_bytes += totals.copied_back_blocks * block_bytes
        copying_s += totals.copying_s
    return HostMemorySection(out_bytes, back_bytes, copying_s) if out_bytes else None


def _transfer_section(transfers: Transfers) -> TransferSection:
    n = max(1, transfers.n_done)
    return TransferSection(
        requests=transfers.n_done,
        migrated=transfers.n_migrated,
        kv_bytes=sum(transfers.links.sent_bytes.values()),
        mean_copy_s=transfers.copied_s / n,
        mean_wait_s=transfers.waited_s / n,
    )


class _Simulation:
    """A simulated run in progress: shows its progress and stops at an interrupt."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        options: SimOptions,
        engine: SimulatedEngine,
        console: Console,
        early: Early | None,
    ) -> None:
        n_requests = len(plan.schedule)
        self.engine, self._options, self._early = engine, options, early
        self._scenario, self._plan, self._console = scenario, plan, console
        self._core, self._simulated_s = "", 0.0
        self._counts: list[ReplicaCounts] = []
        self._progress = Progress(
            console,
            n_requests,
            scenario.horizon_s,
            scenario.has_closed_loop,
            scenario.requests_in_flow,
        )
        self._n_interrupts = self._n_handled = 0
        self._next_beat = time.monotonic() + _BEAT_S
        self._started = time.monotonic()
        self.client: VirtualClient | OpenLoop

    def run(self, again: Callable[[], SimulatedEngine]) -> None:
        """Run on the step core in C, or on the Python core where the other does not simulate the
        settings. `again` builds the engine anew."""
        with self._progress:
            try:
                chosen = chosen_core(self._scenario, self._plan, self._options, self.engine)
            except NotCovered as error:
                self._core = f"python: {error}"
                self._run_python()
            except MissingDependency as error:
                self._core = "python: no compiled simulator on this machine"
                self._console.print(f"note: {error}; simulated in Python", markup=False)
                self._run_python()
            else:
                status = self._run_compiled(chosen)
                self._core = "compiled"
                if status is not Status.done:
                    self._core = f"python: {GIVEN_UP[status]}"
                    self.engine = again()  # because random numbers were drawn
                    self._run_python()
            self._beat()

    def _run_compiled(self, chosen: ChosenCore) -> Status:
        """Returns why the step core ended."""
        options, states = self._options, [r.state for r in self.engine.simulator.replicas]
        scenario, plan, limit = self._scenario, self._plan, options.declared_max_tokens
        rng = np.random.default_rng(options.cluster.router_seed)
        if chosen.is_open:
            self.client = OpenLoop(scenario, plan, limit, self._early)
            traffic = self.client.traffic
        else:
            self.client = VirtualClient(scenario, plan, limit, self._on_step, self._early)
            traffic = traffic_of(plan)
        with step_core(chosen.path, traffic, chosen.engines, chosen.router, rng) as core:
            if isinstance(self.client, OpenLoop):
                status = self.client.run(core, self._on_step)
            else:
                status = CompiledService(core, traffic, states).run(self.client)
            self._simulated_s = core.now_s
            self._counts = [
                ReplicaCounts(
                    EngineTotals(
                        steps=total.n_steps,
                        preemptions=total.n_preemptions,
                        padding_tokens=total.n_padding,
                        output_tokens=total.n_sampled,
                        cached_tokens=total.n_cached,
                    ),
                    total.n_received,
                    total.request_s,
                    total.busy_s,
                )
                for total in core.totals()
            ]
        return status

    def _run_python(self) -> None:
        simulator = self.engine.simulator
        kv = simulator.replicas[0].state.kv
        self.client = VirtualClient(
            self._scenario,
            self._plan,
            self._options.declared_max_tokens,
            self._on_step,
            self._early,
            kv.block_tokens if kv.prefix_cache else None,
        )
        simulator.run(self.client)
        self._simulated_s, self._counts = simulator.now_s, _counts(self.engine)

    def tables(self) -> tuple[Requests, Chunks, Names]:
        if isinstance(self.client, VirtualClient):
            return self.client.tables()
        return self.client.tables([r.state for r in self.engine.simulator.replicas])

    def engine_section(self) -> SimulatedEngineSection:
        """The engine's counters, and why requests waited."""
        simulator, wiring = self.engine.simulator, self.engine.wiring
        totals, simulated_s = [count.totals for count in self._counts], self._simulated_s
        has_cluster = len(totals) > 1 or wiring.conductor is not None
        is_pipelined = isinstance(simulator.replicas[0], PipelinedReplica)
        has_sections = has_cluster or is_pipelined
        replicas = _sections(self.engine, self._counts, simulated_s) if has_sections else ()
        transfers, failures, scaling = wiring.transfers, wiring.failures, wiring.scaling
        waits: dict[str, dict[str, float]] = {}
        for (name, why), seconds in sorted(self.client.waits_s.items()):
            waits.setdefault(name, {})[why] = seconds
        wall_s = time.monotonic() - self._started
        return SimulatedEngineSection(
            steps=sum(total.steps for total in totals),
            preemptions=sum(total.preemptions for total in totals),
            padding_tokens=sum(total.padding_tokens for total in totals),
            cached_tokens=sum(total.cached_tokens for total in totals),
            waits_s=waits,
            simulated_s=simulated_s,
            wall_s=wall_s,
            router=self._options.cluster.router if has_cluster else "",
            replicas=replicas,
            transfers=None if transfers is None else _transfer_section(transfers),
            failures=None
            if failures is None
            else FailureSection(
                failures=sum(replica.n_failures for replica in simulator.replicas),
                retried=failures.n_retried,
                lost=failures.n_lost,
            ),
            scaling=None
            if not scaling
            else ScalingSection(
                starts=sum(part.n_starts for part in scaling),
                mean_replicas=sum(replica.on_share for replica in replicas),
            ),
            host=_host_section(simulator),
            core=self._core,
        )

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Counts Ctrl-C here; the run stops between two steps. A second Ctrl-C in the same step
        ends it. Only the main thread may handle signals."""

        def note(number: int, frame: FrameType | None) -> None:
            if self._n_interrupts > self._n_handled:
                raise KeyboardInterrupt
            self._n_interrupts += 1

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {n: signal.signal(n, note) for n in ending_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_step(self) -> None:
        if self._n_interrupts > self._n_handled:
            self._n_handled = self._n_interrupts
            self._progress.note("interrupted: the report covers the simulation so far")
            self.client.stop("interrupted", "you stopped the simulation", 0.0)
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        self._next_beat = time.monotonic() + _BEAT_S
        self._progress.beat(0, self.client.beat())
