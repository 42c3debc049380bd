"""The verbs of the panel Scale: web, worker, locustfile.

Importing locust patches the process, so this process never does: it builds Locust's command line
and is replaced by Locust.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from loadgen.cli import parse
from loadgen.cli.flags import (
    Force,
    Plugin,
    RunDirectory,
    ScenarioFlags,
    Set,
    Slo,
    TrafficFlags,
    with_flags,
)
from loadgen.errors import MissingDependency, UsageError
from loadgen.system.cache_directory import cache_dir
from loadgen.system.endings import ending_signals
from loadgen.units import write_duration

verbs = typer.Typer()
LOOPBACK = "127.0.0.1"
PATIENCE_S = 300
"""Seconds for which a headless master waits for its workers; a container may have to fetch its
image first."""
PASSWORD = "SLOBENCH_WEB_PASSWORD"
SECRET_ENV, _OWN_SECRET = "SLOBENCH_WORKER_SECRET_ENV", "SLOBENCH_WORKER_SECRET"
"""The variable with the name of the variable that holds the worker secret, and the latter for
workers that `slobench web` starts."""
_FEWEST_CHARACTERS = 16
IN_FORM = ("rate", "duration", "warmup")
"""The traffic flags that the form has as fields."""
PLUGINS, TARGET = "SLOBENCH_WORKER_PLUGINS", "SLOBENCH_WORKER_TARGET"


@dataclass(frozen=True)
class FormFlags:
    """The fields of the start form (`loadgen.web.form.RunForm`) that are single values."""

    scenario: Annotated[
        str, typer.Option(help="A scenario file or a shipped scenario; the form lists all.")
    ] = ""
    target: Annotated[
        str,
        typer.Option(
            "--target", "--host", "-H", help="A URL, a target file, `reference` or `mock`."
        ),
    ] = ""
    seed: Annotated[int | None, typer.Option(help="Another seed draws another schedule.")] = None
    model: Annotated[str, typer.Option(help="The API's model field.")] = ""
    engine: Annotated[str, typer.Option(help="Settings of `reference` or `mock`.")] = ""
    max_skew: Annotated[
        str, typer.Option(help="Largest difference between the workers' starts; else no start.")
    ] = "50ms"
    on_worker_loss: Annotated[
        str, typer.Option(help="continue, or abort: the other workers when one is lost.")
    ] = "continue"


WorkerSecretEnv = Annotated[
    str | None,
    typer.Option(
        "--worker-secret-env",
        metavar="NAME",
        help="Environment variable with a secret that master and workers share.",
    ),
]


SpawnRate = Annotated[
    float | None,
    typer.Option(
        "--spawn-rate", "-r", help="With --users: users that join per second; else all at once."
    ),
]


def ramp_up(spawn_rate_per_s: float | None, n_users: int | None) -> list[str]:
    """The assignment for --set that lets `n_users` join at a rate. Raises UsageError without
    users, or for a rate that is not above 0."""
    if spawn_rate_per_s is None:
        return []
    if n_users is None:
        raise UsageError("--spawn-rate needs --users, e.g. --users 32 --spawn-rate 4")
    if not 0 < spawn_rate_per_s < float("inf"):
        raise UsageError(f"--spawn-rate {spawn_rate_per_s:g}: expected users per second above 0")
    return [f"arrivals.ramp_up={write_duration(n_users / spawn_rate_per_s)}"]


@dataclass(frozen=True)
class ProcessFlags:
    """The processes and their addresses. With neither --workers nor --expect-workers, one process
    does everything."""

    headless: Annotated[
        bool, typer.Option("--headless", help="No page: start at once, end with the verdict.")
    ] = False
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "--processes",
            min=0,
            help="Workers to start on this machine; 0: one process for all.",
        ),
    ] = 0
    expect_workers: Annotated[
        int, typer.Option(min=0, help="Wait for this many `slobench worker` on other machines.")
    ] = 0
    web_host: Annotated[
        str, typer.Option(help="Address of the page; 0.0.0.0 is every interface.")
    ] = LOOPBACK
    web_port: Annotated[
        int, typer.Option("--web-port", "-P", min=1, max=65535, help="Port of the page.")
    ] = 8089
    web_login: Annotated[
        bool,
        typer.Option("--web-login", help="Require the password in SLOBENCH_WEB_PASSWORD."),
    ] = False
    master_host: Annotated[
        str,
        typer.Option(
            "--master-host",
            "--master-bind-host",
            help="Address for workers on other machines; 0.0.0.0 is every interface.",
        ),
    ] = LOOPBACK
    master_port: Annotated[
        int,
        typer.Option(
            "--master-port", "--master-bind-port", min=1, max=65535, help="Port for these workers."
        ),
    ] = 5557
    worker_secret_env: WorkerSecretEnv = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", help="A further name of the page; repeatable."),
    ] = None


@verbs.command(
    epilog="Example: slobench web --headless --workers 2 --scenario quickstart --target mock",
)
@with_flags
def web(
    form: FormFlags,
    traffic: TrafficFlags,
    processes: ProcessFlags,
    slo: Slo = None,
    set_: Set = None,
    out: RunDirectory = None,
    force: Force = False,
    plugin: Plugin = None,
    spawn_rate: SpawnRate = None,
) -> None:
    """Run on Locust: its page with our numbers, and load from several machines."""
    set_ = [*(set_ or []), *ramp_up(spawn_rate, traffic.users)]
    options = (
        form_options(form)
        | traffic_options(traffic)
        | {
            "slo": together(parse.slo_flags(slo, None) or []),
            "set": together(set_ or []),
            "out": str(out or ""),
            "plugin": together([str(path) for path in plugin or []]),
        }
    )
    check_processes(processes, options)
    if "traffic" in options:  # mistakes show here, not in Locust's output
        parse.choose_scenario(
            ScenarioFlags(
                scenario=form.scenario or None, slo=slo, seed=form.seed, set_=set_, plugin=plugin
            ),
            traffic,
        )
    words = [word for key, value in options.items() if value for word in (f"--{key}", value)]
    flags = ["--force"] if force else []
    _become(
        [*_process_words(processes), *_page_words(processes), *words, *flags],
        secret_environ(processes),
    )


@verbs.command(epilog="Example: slobench worker --master 10.0.0.5")
def worker(
    master: Annotated[
        str,
        typer.Option("--master", "--master-host", help="The machine that runs `slobench web`."),
    ],
    port: Annotated[
        int,
        typer.Option(
            "--port", "--master-port", min=1, max=65535, help="The --master-port of `slobench web`."
        ),
    ] = 5557,
    target: Annotated[
        Path | None,
        typer.Option(help="A target file of this machine, for header values and certificates."),
    ] = None,
    worker_secret_env: WorkerSecretEnv = None,
    plugin: Plugin = None,
) -> None:
    """Generate load for a `slobench web` on another machine; the API key is this machine's own."""
    if target is not None and not target.is_file():
        raise UsageError(f"--target {target}: no such target file")
    environ = {PLUGINS: os.pathsep.join(str(path.resolve()) for path in plugin or [])}
    if worker_secret_env is not None:
        environ |= _named_secret(worker_secret_env)
    if target is not None:
        environ[TARGET] = str(target.resolve())
    _become(["--worker", "--master-host", master, "--master-port", str(port)], environ)


@verbs.command(epilog="Example: slobench collect runs/latest")
def collect(
    run: Annotated[Path, typer.Argument(help="The run directory on the master's machine.")],
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="A worker's folder of kept rows, copied here; repeatable. Default: of this host.",
        ),
    ] = None,
) -> None:
    """Add the rows that workers kept when their master was killed to a run, and report it."""
    from loadgen.archive.collect import UNCONFIRMED
    from loadgen.archive.collect import collect as collect_rows
    from loadgen.cli.terminal import print_summary
    from loadgen.run.conclude import conclude

    cache = cache_dir(os.environ)
    own = [] if cache is None else [cache / UNCONFIRMED]
    for share in collect_rows(run, source or own):
        typer.echo(f"collected share {share.shard} from {share.folder}", err=True)
    print_summary(conclude(run, None, None, cache), as_json=False, directory=run)
    typer.echo(f"report: {run / 'report.html'}", err=True)


@verbs.command(
    epilog="Example: locust -f $(slobench locustfile) --host http://localhost:8000",
)
def locustfile() -> None:
    """Print the path of the locustfile that slobench brings."""
    typer.echo(locustfile_path())


def form_options(form: FormFlags) -> dict[str, str]:
    """Options by their names on Locust's command line."""
    values = {field.name: getattr(form, field.name) for field in fields(form)}
    values["host"] = values.pop("target")
    return {
        name.replace("_", "-"): "" if value is None else str(value)
        for name, value in values.items()
    }


def traffic_options(traffic: TrafficFlags) -> dict[str, str]:
    """The traffic flags by their names on Locust's command line: those of the form each, the others
    together as JSON, because Locust has a --users of its own."""
    given = {name: value for name, value in asdict(traffic).items() if value is not None}
    options = {name: str(given.pop(name)) for name in IN_FORM if name in given}
    return options | ({"traffic": json.dumps(given)} if given else {})


def check_processes(processes: ProcessFlags, options: Mapping[str, str]) -> None:
    """Raises UsageError for processes that could not start."""
    if processes.workers and processes.expect_workers:
        raise UsageError(
            "--workers starts workers here, --expect-workers waits for others: use one of the two"
        )
    has_traffic = "traffic" in options
    if processes.headless and not options.get("scenario") and not has_traffic:
        raise UsageError(
            "no scenario: add --scenario (see `slobench list scenarios`), or --rate, --input-len, "
            "--output-len, --duration"
        )
    if processes.headless and not options.get("host") and not os.environ.get("OPENAI_BASE_URL"):
        raise UsageError("no target: add --target URL, a target file, reference or mock")
    if processes.web_login:
        password(os.environ)
    check_ports(processes)


def check_ports(processes: ProcessFlags) -> None:
    """Raises UsageError where the page or the master could not listen."""
    if not processes.headless:
        _check_port("--web-port", processes.web_host, processes.web_port)
    if processes.expect_workers:
        _check_port("--master-port", processes.master_host, processes.master_port)


def password(environ: Mapping[str, str]) -> str:
    """The password of --web-login. Raises UsageError for none: an empty password would admit
    everyone."""
    value = environ.get(PASSWORD, "")
    if not value:
        raise UsageError(
            f"--web-login: the environment variable {PASSWORD} is not set or is empty; export "
            f"{PASSWORD}=… or leave --web-login out"
        )
    return value


def read_secret(environ: Mapping[str, str]) -> bytes | None:
    """The secret that master and workers share; None without `--worker-secret-env`. Raises
    UsageError."""
    name = environ.get(SECRET_ENV)
    if not name:
        return None
    value = environ.get(name, "")
    if len(value) < _FEWEST_CHARACTERS:
        found = f"has {len(value)} characters" if value else "is not set or is empty"
        raise UsageError(
            f"--worker-secret-env: the environment variable {name} {found}; expected a secret of "
            f"at least {_FEWEST_CHARACTERS} characters, e.g. export {name}=$(openssl rand -hex 32)"
        )
    return os.fsencode(value)


def secret_environ(processes: ProcessFlags) -> dict[str, str]:
    """The variables by which master and workers find their secret. Workers that this command starts
    get a random secret if none is named."""
    if processes.worker_secret_env is not None:
        return _named_secret(processes.worker_secret_env)
    if processes.workers:
        return {SECRET_ENV: _OWN_SECRET, _OWN_SECRET: secrets.token_hex(32)}
    if processes.expect_workers and processes.master_host not in ("localhost", "::1", LOOPBACK):
        typer.echo(
            f"anyone who reaches port {processes.master_port} can join as a worker; use "
            "--worker-secret-env on both sides to admit only yours",
            err=True,
        )
    return {}


def _named_secret(name: str) -> dict[str, str]:
    variables = {SECRET_ENV: name}
    read_secret(os.environ | variables)
    return variables


def _check_port(flag: str, host: str, port: int) -> None:
    """Raises UsageError where no process can listen, before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(("" if host == "*" else host, port), family=family).close()
    except OSError as error:
        hint = (
            "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
        )
        raise UsageError(f"{flag} {port}: cannot listen at {host}:{port}: {hint}") from None


def locustfile_path() -> Path:
    """The packaged locustfile, found without importing it (it imports locust)."""
    if importlib.util.find_spec("locust") is None:
        raise MissingDependency("the web UI needs Locust: pip install 'slobench[web]'")
    return Path(__file__).parents[1] / "web" / "locustfile.py"


def together(values: Sequence[str]) -> str:
    """Several values as one option of Locust's. Raises UsageError for a value with a semicolon."""
    for value in values:
        if ";" in value:
            raise UsageError(f"{value!r}: a semicolon separates several values here")
    return "; ".join(values)


def _process_words(processes: ProcessFlags) -> list[str]:
    patience = ["--expect-workers-max-wait", str(PATIENCE_S)]
    if processes.workers:
        port = str(_free_port())
        here = [word for end in ("bind-", "") for word in (f"--master-{end}host", LOOPBACK)]
        ports = ["--master-bind-port", port, "--master-port", port]
        return ["--processes", str(processes.workers), *here, *ports, *patience]
    if processes.expect_workers:
        expected = ["--expect-workers", str(processes.expect_workers)]
        bound = ["--master-bind-host", processes.master_host]
        ports = ["--master-bind-port", str(processes.master_port)]
        return ["--master", *expected, *patience, *bound, *ports]
    return []


def _page_words(processes: ProcessFlags) -> list[str]:
    if processes.headless:
        return ["--headless", "--only-summary", "--loglevel", "WARNING"]
    login = ["--web-login"] if processes.web_login else []
    allowed = ["--allowed-host", together(processes.allowed_host)] if processes.allowed_host else []
    return [
        *allowed,
        "--web-host",
        processes.web_host,
        "--web-port",
        str(processes.web_port),
        *login,
    ]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def _become(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    start = ["-P", "-m", "loadgen.web.locust_start", "-f", str(locustfile_path())]
    command = [sys.executable, *start, *words]
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())  # until the new program handles them
    os.execve(sys.executable, command, {**os.environ, **environ})
