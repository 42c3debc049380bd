"""What `web`, `worker` and `locustfile` do: put Locust's command line together and become it.

Importing locust patches the process, so this process never does: it is replaced.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from loadgen.errors import MissingDependency, UsageError

LOOPBACK = "127.0.0.1"
PATIENCE_S = 300
"""Seconds for which a headless master waits for its workers; a container may have to fetch its
image first."""
PASSWORD = "SLOBENCH_WEB_PASSWORD"
PLUGINS, TARGET = "SLOBENCH_WORKER_PLUGINS", "SLOBENCH_WORKER_TARGET"


@dataclass(frozen=True)
class Where:
    """Which processes there are and where they listen. `n_local` workers are started here,
    `n_expected` come from elsewhere; with neither, one process does everything."""

    is_headless: bool = False
    n_local: int = 0
    n_expected: int = 0
    web_host: str = LOOPBACK
    web_port: int = 8089
    master_host: str = LOOPBACK
    master_port: int = 5557
    has_login: bool = False


def asked(
    scenario: str,
    target: str,
    rate: str | None,
    duration: str | None,
    warmup: str | None,
    slo: Sequence[str],
    seed: int | None,
    settings: Sequence[str],
    model: str,
    engine: str,
    out: Path | None,
    plugins: Sequence[Path],
    max_skew: str,
    on_worker_loss: str,
) -> dict[str, str]:
    """Options by the names they have on Locust's command line."""
    return {
        "scenario": scenario,
        "host": target,
        "rate": rate or "",
        "duration": duration or "",
        "warmup": warmup or "",
        "slo": together(slo),
        "seed": "" if seed is None else str(seed),
        "set": together(settings),
        "model": model,
        "engine": engine,
        "out": str(out or ""),
        "plugin": together([str(path) for path in plugins]),
        "max-skew": max_skew,
        "on-worker-loss": on_worker_loss,
    }


def web(asked: Mapping[str, str], flags: Sequence[str], where: Where) -> NoReturn:
    """Become Locust's page, or its headless master. `asked` are slobench's own options for it."""
    if where.n_local and where.n_expected:
        raise UsageError(
            "--workers starts them here, --expect-workers waits for others: give one of the two"
        )
    if where.is_headless and not asked.get("scenario"):
        raise UsageError("which traffic? Add --scenario (see `slobench list scenarios`)")
    if where.is_headless and not asked.get("host") and not os.environ.get("OPENAI_BASE_URL"):
        raise UsageError("which server? Add --target URL, a target file, reference or mock")
    if where.has_login:
        password(os.environ)
    check_ports(where)
    own = [word for key, value in asked.items() if value for word in (f"--{key}", value)]
    _become([*_processes(where), *_page(where), *own, *flags], {})


def worker(master: str, port: int, target: Path | None, plugins: Sequence[Path]) -> NoReturn:
    """Become one of Locust's workers."""
    if target is not None and not target.is_file():
        raise UsageError(f"--target {target}: no such target file")
    environ = {PLUGINS: os.pathsep.join(str(path.resolve()) for path in plugins)}
    if target is not None:
        environ[TARGET] = str(target.resolve())
    _become(["--worker", "--master-host", master, "--master-port", str(port)], environ)


def password(environ: Mapping[str, str]) -> str:
    """What --web-login asks for. Raises UsageError where there is none: the empty one opens to
    everybody."""
    found = environ.get(PASSWORD, "")
    if not found:
        raise UsageError(
            f"--web-login: the environment variable {PASSWORD} is not set or is empty; export "
            f"{PASSWORD}=… or leave --web-login out"
        )
    return found


def check_ports(where: Where) -> None:
    """Raises UsageError where the page or the master cannot listen, as a run has not begun yet."""
    if not where.is_headless:
        _check_port("--web-port", where.web_host, where.web_port)
    if where.n_expected:
        _check_port("--master-port", where.master_host, where.master_port)


def _check_port(flag: str, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(("" if host == "*" else host, port), family=family).close()
    except OSError as error:
        hint = (
            "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
        )
        raise UsageError(f"{flag} {port}: cannot listen at {host}:{port}: {hint}") from None


def locustfile() -> Path:
    """The packaged locustfile, found without importing what it imports."""
    _need_locust()
    return Path(__file__).parents[1] / "web" / "locustfile.py"


def together(parts: Sequence[str]) -> str:
    """Several values as one option of Locust's. Raises UsageError for one that holds a
    semicolon."""
    for part in parts:
        if ";" in part:
            raise UsageError(f"{part!r}: a semicolon separates several values here")
    return "; ".join(parts)


def _processes(where: Where) -> list[str]:
    patience = ["--expect-workers-max-wait", str(PATIENCE_S)]
    if where.n_local:
        port = str(_free_port())
        here = [word for end in ("bind-", "") for word in (f"--master-{end}host", LOOPBACK)]
        ports = ["--master-bind-port", port, "--master-port", port]
        return ["--processes", str(where.n_local), *here, *ports, *patience]
    if where.n_expected:
        expected = ["--expect-workers", str(where.n_expected)]
        bound = ["--master-bind-host", where.master_host]
        ports = ["--master-bind-port", str(where.master_port)]
        return ["--master", *expected, *patience, *bound, *ports]
    return []


def _page(where: Where) -> list[str]:
    if where.is_headless:
        return ["--headless", "--only-summary", "--loglevel", "WARNING"]
    login = ["--web-login"] if where.has_login else []
    return ["--web-host", where.web_host, "--web-port", str(where.web_port), *login]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _become(words: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    command = [sys.executable, "-P", "-m", "locust", "-f", str(locustfile()), *words]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, {**os.environ, **environ})


def _need_locust() -> None:
    if importlib.util.find_spec("locust") is None:
        raise MissingDependency("the web UI needs Locust: pip install 'slobench[web]'")
