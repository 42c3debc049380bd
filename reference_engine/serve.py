"""Wiring: from options to a listening server, and back to an exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import uvloop
from aiohttp import web

from loadgen.errors import SlobenchError, UsageError
from reference_engine.core.setup import Setup
from reference_engine.metrics.gpu import open_gpu
from reference_engine.metrics.metrics import EngineMetrics
from reference_engine.policies.base import Policy
from reference_engine.serving.build import Engine, build
from reference_engine.serving.guard import Guard
from reference_engine.serving.http_workers.engine_messages import Open
from reference_engine.serving.http_workers.processes import HttpWorkers
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.routes.completions import CompletionRoutes
from reference_engine.serving.routes.debug import DebugRoutes
from reference_engine.serving.routes.estimate_route import EstimateRoutes
from reference_engine.serving.routes.identity_routes import AboutRoutes
from reference_engine.serving.routes.loading import loading_routes
from reference_engine.serving.routes.operator import InterventionRoutes
from reference_engine.serving.serve_options import ServeOptions, policy_of
from reference_engine.serving.service import Service
from reference_engine.state.steps import StepEvent, StepRecord
from reference_engine.step_log.step_files import StepFiles

log = logging.getLogger("reference_engine")

_SWITCH_INTERVAL_S = 5e-4
_SEND_BYTES = 1 << 17


def run(options: ServeOptions) -> int:
    """Serve until SIGTERM, SIGINT or the parent's end; returns the exit code.

    Prints `READY http://host:port` to stdout when requests are accepted. Until then the port
    answers `/health` with 200 and everything else with 503. What stops it from getting ready is
    one line on stderr and exit code 2.
    """
    signal.signal(signal.SIGTERM, _leave)  # until the event loop has its own handlers
    try:
        with _bind(options.host, options.port) as listener:
            api_key = _api_key(options.api_key_env)
            # The engine thread computes all the time; the default of 5 ms would delay each token.
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            with (
                HttpWorkers(n_fronts(options), listener) as fronts,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(_serve(options, listener, fronts, api_key))
    except SlobenchError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the one line the caller shows
        return error.exit_code
    except KeyboardInterrupt:
        return 0
    return 0


async def _serve(
    options: ServeOptions, listener: socket.socket, fronts: HttpWorkers, api_key: str | None
) -> None:
    guard = Guard(api_key, options.max_body_bytes)
    # The socket goes on listening from the first application to the second: nobody is refused.
    async with _listening(guard.app(loading_routes()), listener):
        engine = await _in_thread(partial(build, options))
    files = None if options.log_dir is None else StepFiles(options.log_dir, engine.clock.epoch_ns)
    wired = wire_up(engine, options, files)
    service = wired.service
    _keep_loaded()
    stopping = asyncio.Event()
    parent_is_gone = _on_stop(stopping, service.hurry, options.parent_pid)
    service.start()

    def told(front: int, engine_path: str) -> Open:
        return Open(
            wired.about,
            front,
            engine.clock.epoch_ns,
            engine_path,
            options.outbox_tokens,
            options.max_body_bytes,
            api_key,
        )

    answering: AbstractAsyncContextManager[None]
    if len(fronts):  # which ask for the key
        app = Guard(None, options.max_body_bytes).app(wired.routes)
        answering = fronts.answering(service, app, told, stopping)
    else:
        answering = _listening(guard.app(wired.routes), listener)
    try:
        async with answering:
            host = f"[{options.host}]" if ":" in options.host else options.host
            port = listener.getsockname()[1]
            print(f"READY http://{host}:{port}", flush=True)  # noqa: T201 - the contract
            await stopping.wait()
            log.info("draining")
            is_over = parent_is_gone() or fronts.is_one_lost
            await service.stop(0.0 if is_over else options.drain_s)
    finally:
        await service.stop()
        if files is not None:
            files.close()


class Wired(NamedTuple):
    """The engine's service, not started, and everything the server answers with it."""

    service: Service
    about: ServerIdentity
    routes: list[web.RouteDef]


def wire_up(engine: Engine, options: ServeOptions, files: StepFiles | None = None) -> Wired:
    """Put the parts of a server together."""
    service = engine.service(options.outbox_tokens, options.max_queue)
    state = engine.state
    state.log.on_step, state.log.on_event = _listeners(service.metrics, files)
    state.log.add_event(Setup.of(state).event(state.view().now_s))
    about = ServerIdentity(
        model=options.model_name or engine.model.name,
        max_model_len=engine.limits.max_model_len,
        version=_version(),
        device=options.device,
        cache={
            "block_size": str(state.kv.block_tokens),
            "num_gpu_blocks": str(state.kv.n_blocks),
            "enable_prefix_caching": str(state.kv.prefix_cache),
        },
    )

    uuid = engine.executor.caps.gpu
    gpu = open_gpu(uuid) if uuid else None

    def make_policy(mode: str, knobs: Mapping[str, Any]) -> Policy:
        return policy_of(mode, options, knobs)

    routes = [
        *CompletionRoutes(service, about).routes(),
        *EstimateRoutes(service, about).routes(),
        *AboutRoutes(service, state, about, gpu).routes(),
        *DebugRoutes(service, about).routes(),
        *InterventionRoutes(service, make_policy).routes(),
    ]
    return Wired(service, about, routes)


def n_fronts(options: ServeOptions) -> int:
    """A GPU's engine keeps its interpreter to itself; a front answers some 60 000 tokens/s."""
    if options.fronts is not None:
        return options.fronts
    n_cores = len(os.sched_getaffinity(0))
    return min(4, max(1, n_cores // 4)) if options.device == "cuda" else 0


def _listeners(
    metrics: EngineMetrics, files: StepFiles | None
) -> tuple[Callable[[StepRecord], None], Callable[[StepEvent], None]]:
    """Who hears of each step and of each event: `/metrics`, and the files if there are any."""
    if files is None:
        return metrics.on_step, metrics.on_event

    def on_step(record: StepRecord) -> None:
        metrics.on_step(record)
        files.on_step(record)

    def on_event(event: StepEvent) -> None:
        metrics.on_event(event)
        files.on_event(event)

    return on_step, on_event


def _keep_loaded() -> None:
    """What is there by now stays; the collector need not look at it again. A look at all of it
    takes 90 ms (torch has 200 000 objects), in which nobody would get a token."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def _listening(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """`app` behind the listener, which stays open."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listener.dup(), backlog=1024).start()
    except OSError as error:
        await runner.cleanup()
        raise UsageError(f"port {listener.getsockname()[1]}: {error.strerror}") from error
    try:
        yield
    finally:
        await runner.cleanup()


async def _in_thread(work: Callable[[], Engine]) -> Engine:
    """`work` in a thread that nobody waits for: a signal while a model is loading ends the
    process at once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Engine] = loop.create_future()

    def run() -> None:
        try:
            engine = work()
        except BaseException as error:  # raised again where it is awaited
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, engine)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await done


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow: a busy port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection. Left alone it grows to megabytes of tokens that nobody reads.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UsageError(
            f"port {port} on {host} cannot be used: {error.strerror}; "
            "choose another, or port 0 for a free one"
        ) from error
    return listener


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise UsageError(f"api_key_env: the environment variable {variable} is not set")
    return os.environ[variable]


def _on_stop(
    stopping: asyncio.Event, hurry: Callable[[], None], parent_pid: int | None
) -> Callable[[], bool]:
    """Set `stopping` on SIGTERM, SIGINT or the end of the parent, and `hurry` on a second signal;
    returns a function that says whether the parent is gone."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: hurry() if stopping.is_set() else stopping.set())
    if parent_pid is None:
        return lambda: False
    try:
        watched = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        stopping.set()
        return lambda: True
    ended = asyncio.Event()

    def end() -> None:
        loop.remove_reader(watched)
        ended.set()
        stopping.set()
        hurry()

    # Readable once the process has ended, even while nobody has collected it.
    loop.add_reader(watched, end)
    return ended.is_set


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def _version() -> str:
    try:
        return version("slobench")
    except PackageNotFoundError:
        return "unknown"
