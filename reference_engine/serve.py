"""The server as a program: from options to a listening socket, and back to an exit code."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, TypeVar

import uvloop
from aiohttp import web

from loadgen.errors import SlobenchError, UsageError
from loadgen.system.endings import ending_signals
from loadgen.system.host_names import host_names
from reference_engine.core.setup import Setup
from reference_engine.metrics.gpu import open_gpu
from reference_engine.serving.build import Engine, build
from reference_engine.serving.guard import TOKEN_HEADER, Guard, running
from reference_engine.serving.http_workers.channel import Open
from reference_engine.serving.http_workers.processes import HttpWorkers
from reference_engine.serving.identity import ServerIdentity
from reference_engine.serving.routes.completions import CompletionRoutes
from reference_engine.serving.routes.debug import DebugRoutes
from reference_engine.serving.routes.estimate import EstimateRoutes
from reference_engine.serving.routes.identity_routes import IdentityRoutes, loading_routes
from reference_engine.serving.routes.token_routes import TokenRoutes
from reference_engine.serving.serve_options import ServeOptions, policy_of
from reference_engine.serving.service import Service
from reference_engine.step_log.step_files import StepFiles

log = logging.getLogger("reference_engine")

T = TypeVar("T")

OPERATOR_TOKEN = "SLOBENCH_OPERATOR_TOKEN"
_SWITCH_INTERVAL_S = 5e-4
_SEND_BYTES = 1 << 17
_ENGINE_FAILED = 4


def print_ready(url: str) -> None:
    """`READY http://host:port` on stdout: requests are accepted."""
    print(f"READY {url}", flush=True)  # noqa: T201 - the contract


def run(
    options: ServeOptions,
    bound: socket.socket | None = None,
    on_ready: Callable[[str], None] = print_ready,
) -> int:
    """Serve until SIGTERM, SIGINT, SIGHUP or the end of the parent process; returns the exit code.

    Calls `on_ready` with `http://host:port` when requests are accepted. Until then `/health`
    returns 200 and every other path 503. An error before that is a line on stderr and exit
    code 2. A server whose engine failed answers with errors until the signal, then returns 4. The
    socket is `bound`, or a new socket on the options' port.
    """
    for number in set(ending_signals()) - {signal.SIGINT}:  # until the event loop has its own
        signal.signal(number, _leave)
    is_watching = threading.Event()
    if options.parent_pid is not None:
        _leave_with_parent(options.parent_pid, is_watching)
    try:
        with bound or bind(options.host, options.port) as listener:
            api_key = _api_key(options.api_key_env)
            operator = operator_token(options, os.environ)
            # The engine thread computes all the time. With the default of 5 ms, the event loop
            # would wait that long for the interpreter before it can send a token.
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            with (
                HttpWorkers(n_http_workers(options), listener) as workers,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                serving = _serve(
                    options, listener, workers, api_key, operator, on_ready, is_watching.set
                )
                return runner.run(serving)
    except SlobenchError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the caller shows this line
        return error.exit_code
    except KeyboardInterrupt:
        return 0


async def _serve(
    options: ServeOptions,
    listener: socket.socket,
    workers: HttpWorkers,
    api_key: str | None,
    operator: OperatorToken,
    on_ready: Callable[[str], None],
    on_built: Callable[[], None],
) -> int:
    max_body_bytes = options.max_body_bytes
    names = host_names(options.host, options.allowed_host, socket.gethostname())
    token = operator.token
    guard = Guard(api_key, max_body_bytes, options.cors, token, names)
    # The socket listens throughout, so no connection is refused between the two applications.
    async with _listening(guard.app(loading_routes()), listener):
        engine = await _in_thread(partial(build, options))
    epoch_ns = engine.clock.epoch_ns
    on_built()
    files = None if options.log_dir is None else StepFiles(options.log_dir, epoch_ns)
    service, identity, routes = wire_up(engine, options, files)
    _freeze_objects()
    stopping = asyncio.Event()
    is_parent_gone = _on_stop(stopping, service.hurry, options.parent_pid)
    service.start()
    answering: AbstractAsyncContextManager[None]
    if len(workers):
        outbox = options.outbox_tokens
        opening = Open(
            identity, 0, epoch_ns, "", outbox, max_body_bytes, api_key, options.cors, token, names
        )
        app = Guard(None, max_body_bytes).app(routes)  # the workers check the rest
        answering = workers.answering(service, app, opening, stopping)
    else:
        answering = _listening(guard.app(routes), listener)
    try:
        async with answering:
            host = f"[{options.host}]" if ":" in options.host else options.host
            port = listener.getsockname()[1]
            if operator.is_random:
                print_token(operator)
            on_ready(f"http://{host}:{port}")
            await stopping.wait()
            log.info("draining")
            is_pointless = is_parent_gone() or workers.is_one_lost
            await service.stop(0.0 if is_pointless else options.drain_s)
    finally:
        try:
            await service.stop()
        finally:
            if files is not None:
                files.close()
    return 0 if service.failure is None else _ENGINE_FAILED


class Wired(NamedTuple):
    """An engine's service, not started, with its identity and all its routes."""

    service: Service
    identity: ServerIdentity
    routes: list[web.RouteDef]


def wire_up(engine: Engine, options: ServeOptions, files: StepFiles | None = None) -> Wired:
    """Connect the parts of a server. Steps and events go to `/metrics` and to `files`."""
    service = engine.service(options.outbox_tokens, options.max_queue)
    state, metrics = engine.state, service.metrics
    state.log.on_step, state.log.on_event = metrics.on_step, metrics.on_event
    if files is not None:
        state.log.on_step = _both(metrics.on_step, files.on_step)
        state.log.on_event = _both(metrics.on_event, files.on_event)
    state.log.add_event(Setup.of(state).event(state.view().now_s))
    identity = ServerIdentity(
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
    routes = [
        *CompletionRoutes(service, identity).routes(),
        *EstimateRoutes(service, identity).routes(),
        *IdentityRoutes(service, state, identity, gpu).routes(),
        *TokenRoutes(engine.tokenizer, identity, engine.limits.vocab_size).routes(),
        *DebugRoutes(service, identity, partial(policy_of, options)).routes(),
    ]
    return Wired(service, identity, routes)


def n_http_workers(options: ServeOptions) -> int:
    """The number of HTTP workers. On a GPU the default is a worker per 4 cores, up to 4, so that
    HTTP does not compete with the engine for the interpreter; a worker sends some 60 000 tokens/s.
    """
    if options.http_workers is not None:
        return options.http_workers
    n_cores = len(os.sched_getaffinity(0))
    return min(4, max(1, n_cores // 4)) if options.device == "cuda" else 0


def _both(first: Callable[[T], None], second: Callable[[T], None]) -> Callable[[T], None]:
    def call(value: T) -> None:
        first(value)
        second(value)

    return call


def _freeze_objects() -> None:
    """Exempt all existing objects from garbage collection. A full collection takes 90 ms (torch has
    200 000 objects), in which no stream would get a token."""
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def _listening(app: web.Application, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` on the listener, which stays open."""
    async with running(app) as runner:
        try:
            await web.SockSite(runner, listener.dup(), backlog=1024).start()
        except OSError as error:
            raise UsageError(f"port {listener.getsockname()[1]}: {error.strerror}") from error
        yield


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, so that a signal while a model is loading ends the process
    at once; `asyncio.to_thread` would wait for the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised again where it is awaited
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, result)

    threading.Thread(target=run, name="loading", daemon=True).start()
    return await done


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Called before anything slow, so that a busy port is an error at once. Raises
    UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Every connection inherits this. By default the buffer grows to megabytes, and a client that
    # does not read would be detected only after all of them.
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


class OperatorToken(NamedTuple):
    """The token for requests that change the server; None for `--operator open`. A random token is
    printed at the start."""

    token: str | None
    is_random: bool = False


def print_token(operator: OperatorToken) -> None:
    """The operator token on stderr, as Jupyter prints its token."""
    shown = f"operator token (header {TOKEN_HEADER}): {operator.token}"
    print(shown, file=sys.stderr, flush=True)  # noqa: T201 - for the user


def operator_token(options: ServeOptions, environ: Mapping[str, str]) -> OperatorToken:
    """The token of the environment, else a random token. Raises UsageError if the variable that the
    options name is not set."""
    if options.operator == "open":
        return OperatorToken(None)
    variable = options.operator_token_env
    if variable is not None and not environ.get(variable):
        raise UsageError(f"operator_token_env: the environment variable {variable} is not set")
    stated = environ.get(variable or OPERATOR_TOKEN)
    return OperatorToken(stated or secrets.token_urlsafe(24), is_random=not stated)


def _on_stop(
    stopping: asyncio.Event, hurry: Callable[[], None], parent_pid: int | None
) -> Callable[[], bool]:
    """Set `stopping` on SIGTERM, SIGINT, SIGHUP or the end of the parent process, and call `hurry`
    on a second signal. Returns a function that returns whether the parent has ended."""
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, lambda: hurry() if stopping.is_set() else stopping.set())
    if parent_pid is None:
        return lambda: False
    try:
        parent_fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        stopping.set()
        return lambda: True
    ended = asyncio.Event()

    def end() -> None:
        loop.remove_reader(parent_fd)
        ended.set()
        stopping.set()
        hurry()

    # Readable once the process has ended, even before its own parent waits for it.
    loop.add_reader(parent_fd, end)
    return ended.is_set


def _leave_with_parent(parent_pid: int, is_watching: threading.Event) -> None:
    """Ends this process with the parent process until `is_watching`: loading a model takes up to
    minutes, and the event loop watches the parent only after that."""

    def wait() -> None:
        try:
            parent_fd = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            pass
        else:
            select.select([parent_fd], [], [])
            os.close(parent_fd)
        if not is_watching.is_set():
            os._exit(0)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _leave(number: int, frame: object) -> None:
    raise SystemExit(0)


def _version() -> str:
    try:
        return version("slobench")
    except PackageNotFoundError:
        return "unknown"
