"""Wiring: from options to a listening server, and back to an exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Literal

import uvloop
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadgen.clock import MonotonicClock
from loadgen.errors import MissingDependency, SlobenchError, UsageError, nearest
from reference_engine.core import EngineState
from reference_engine.executors.base import EXECUTORS, Executor, ExecutorKind, Site
from reference_engine.kv import BLOCK_TOKENS, KvPool
from reference_engine.model.config import ModelConfig, ModelSource
from reference_engine.model.zoo import resolve
from reference_engine.plan import Limits
from reference_engine.policies.base import POLICIES, Policy
from reference_engine.server import About, Api
from reference_engine.service import Service
from reference_engine.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("reference_engine")

DEVICES: Mapping[str, str] = {"cpu": "torch_cpu", "toy": "toy"}
_KV_BYTES = 1 << 30
_STEP_TOKENS = 2048
_SWITCH_INTERVAL_S = 5e-4


class ServeOptions(BaseModel):
    """What can be chosen about a server; the keys of `--engine` and of `python -m
    reference_engine`.

    `kv_blocks` None takes 1 GiB of KV, at most 4 096 blocks and at least one full context.
    `token_budget` None is the mode's own.
    `policy_args` and `executor_args` are further parameters of the mode and of the executor.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: str = "chunked"
    shape: str = "tiny"
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    max_model_len: int | None = Field(default=None, ge=2)
    kv_blocks: int | None = Field(default=None, ge=1)
    max_num_seqs: int = Field(default=256, ge=1)
    token_budget: Annotated[int, Field(ge=1)] | Literal["slo"] | None = None
    seed: int = Field(default=0, ge=0)
    model_name: str | None = None
    printable: bool = True
    prefix_cache: bool = True
    policy_args: dict[str, Any] = Field(default_factory=dict)
    executor_args: dict[str, Any] = Field(default_factory=dict)
    api_key_env: str | None = None
    parent_pid: int | None = Field(default=None, ge=1)
    drain_s: float = Field(default=10.0, ge=0)


@dataclass(frozen=True, slots=True)
class Engine:
    """A built engine, not yet running."""

    model: ModelSource
    limits: Limits
    state: EngineState
    executor: Executor
    tokenizer: Tokenizer
    clock: MonotonicClock

    def service(self) -> Service:
        """The engine in a thread; needs a running event loop."""
        return Service(self.state, self.executor, self.tokenizer, self.clock)


def run(options: ServeOptions) -> int:
    """Serve until SIGTERM, SIGINT or the parent's end; returns the exit code.

    Prints `READY http://host:port` to stdout when requests are accepted. What stops it from
    getting there is one line on stderr and exit code 2.
    """
    signal.signal(signal.SIGTERM, _leave)  # until the event loop has its own handlers
    try:
        with _bind(options.host, options.port) as listener:
            engine = build(options)
            api_key = _api_key(options.api_key_env)
            # The engine thread computes all the time; the default of 5 ms would delay each token.
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(options, engine, listener, api_key))
    except SlobenchError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the one line the caller shows
        return error.exit_code
    except KeyboardInterrupt:
        return 0
    return 0


def build(options: ServeOptions) -> Engine:
    """Model, KV, policy and executor. Raises UsageError or MissingDependency naming the option."""
    model = resolve(options.shape)
    max_model_len = min(options.max_model_len or 4096, model.config.max_model_len)
    if options.max_model_len is not None and options.max_model_len > model.config.max_model_len:
        raise UsageError(
            f"max_model_len: {options.max_model_len} is above the {model.config.max_model_len} "
            f"positions of '{model.name}'"
        )
    n_blocks = options.kv_blocks or _default_blocks(model.config, max_model_len)
    policy = _policy(options)
    limits = Limits(
        max_num_seqs=options.max_num_seqs,
        max_step_tokens=max(_budget(policy), max_model_len) + options.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
    )
    clock = MonotonicClock()
    tokenizer = load_tokenizer(
        model.directory, options.printable and model.directory is None, model.config.eos_ids
    )
    site = Site(model, n_blocks, BLOCK_TOKENS, max_model_len, time.sleep)
    executor = _executor_kind(options).build(site)
    kv = KvPool(n_blocks, prefix_cache=options.prefix_cache)
    state = EngineState(limits, kv, clock, policy)
    return Engine(model, limits, state, executor, tokenizer, clock)


def _policy(options: ServeOptions) -> Policy:
    cls = POLICIES.get(options.mode)
    known: dict[str, Any] = {}
    if "max_num_seqs" in cls.model_fields:  # the engine's own limit holds for the others
        known["max_num_seqs"] = options.max_num_seqs
    if options.token_budget is not None:
        if "token_budget" not in cls.model_fields:
            raise UsageError(f"token_budget: the mode '{options.mode}' has none")
        known["token_budget"] = options.token_budget
    try:
        return cls.model_validate({**known, **options.policy_args})
    except ValidationError as error:
        raise UsageError(first_problem(error, "policy_args", cls.model_fields)) from error


def _budget(policy: Policy) -> int:
    """Tokens a mode wants in one step, as far as it says so."""
    budget = getattr(policy, "token_budget", None)
    return budget if isinstance(budget, int) else _STEP_TOKENS


def _executor_kind(options: ServeOptions) -> ExecutorKind:
    if options.device not in DEVICES:
        raise UsageError(
            f"device: unknown device '{options.device}'; {nearest(options.device, DEVICES)}"
        )
    try:
        cls = EXECUTORS.get(DEVICES[options.device])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingDependency(
            f"device '{options.device}' needs torch: pip install 'slobench[engine]' "
            "(or use device=toy, which needs nothing)"
        ) from error
    shared = {"threads": options.threads, "seed": options.seed}
    known = {key: value for key, value in shared.items() if key in cls.model_fields}
    try:
        return cls.model_validate({**known, **options.executor_args})
    except ValidationError as error:
        raise UsageError(first_problem(error, "executor_args", cls.model_fields)) from error


def first_problem(error: ValidationError, where: str, known: Mapping[str, object]) -> str:
    """One line for the first mistake in a mapping of parameters."""
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'; {nearest(key, known)}"
    return f"{where}: {key}: {problem['msg']}, got {problem['input']!r}"


def _default_blocks(config: ModelConfig, max_model_len: int) -> int:
    affordable = _KV_BYTES // (config.kv_bytes_per_token() * BLOCK_TOKENS)
    return max(-(-max_model_len // BLOCK_TOKENS), min(4096, affordable))


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow: a busy port is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


async def _serve(
    options: ServeOptions, engine: Engine, listener: socket.socket, api_key: str | None
) -> None:
    service = engine.service()
    stopping = asyncio.Event()
    parent_is_gone = _on_stop(stopping, service.hurry, options.parent_pid)
    about = About(
        model=options.model_name or engine.model.name,
        max_model_len=engine.limits.max_model_len,
        version=_version(),
        mode=options.mode,
        device=options.device,
    )
    runner = web.AppRunner(
        Api(service, about, api_key).app(),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=1.0,
    )
    await runner.setup()
    service.start()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = listener.getsockname()[1]
        print(f"READY http://{host}:{port}", flush=True)  # noqa: T201 - the contract
        await stopping.wait()
        log.info("draining")
    except OSError as error:
        raise UsageError(f"port {options.port} on {options.host}: {error.strerror}") from error
    finally:
        await service.stop(0.0 if parent_is_gone() else options.drain_s)
        await runner.cleanup()


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
