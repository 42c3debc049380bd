"""The bundled engine and the scripted mock server as targets, each a child process that runs for
the length of a `with` block.

    with engine({"mode": "chunked", "shape": "tiny"}, run_dir / "logs") as served:
        measure(served.endpoint)
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loadgen.errors import UsageError, nearest
from targets.child import Child, child_server
from targets.endpoint import OPERATOR_TOKEN, Endpoint, Labels
from targets.mock_script import OPTIONS, split_options

ENGINE_DEFAULTS: Mapping[str, str] = {
    "mode": "chunked",
    "shape": "tiny",
    "device": "cpu",
    "threads": "1",  # so that it cannot starve the client on the same machine
    "port": "0",
    "drain_s": "2",  # requests still in progress after a run have no client
}
MOCK_SERVER_OPTIONS = ("host", "port", "tls_cert", "tls_key", "unix")
_SECRET = ("api_key", "api-key")  # labels reach the manifest


@dataclass(frozen=True)
class Served:
    """A running server of this project: its endpoint and its process."""

    endpoint: Endpoint
    child: Child


def parse_engine(text: str) -> dict[str, str]:
    """The options of the engine and of its mode in `mode=chunked,shape=tiny,watermark=0.05`.

    Names and values are checked by the engine: it ends with an error line if it cannot serve them.
    """
    options: dict[str, str] = {}
    for key, value in split_options(text):
        name = key.replace("-", "_")
        if name in options:
            raise UsageError(f"engine option '{key}' is given twice: {options[name]} and {value}")
        options[name] = value
    return options


@contextmanager
def engine(
    options: Mapping[str, str],
    log_dir: Path,
    *,
    plugins: Sequence[Path] = (),
    ready_timeout_s: float = 120.0,
) -> Iterator[Served]:
    """The bundled engine, serving while the `with` block runs. It writes its log, `engine.log`, and
    at its end its steps and events (Parquet) to `log_dir`. `plugins` are Python files with the
    user's own modes.

    Raises MissingDependency (no torch), UsageError (a bad option, a busy port) or TargetError (it
    died or was never ready), with the last line of the engine's log.
    """
    chosen = {**ENGINE_DEFAULTS, **options}
    flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    flags += ["--log-dir", str(log_dir.resolve())]
    flags += [part for path in plugins for part in ("--plugin", str(path.resolve()))]
    token = secrets.token_urlsafe(24)
    with child_server(
        "engine",
        "reference_engine",
        flags,
        log_dir=log_dir,
        ready_timeout_s=ready_timeout_s,
        environ={OPERATOR_TOKEN: token},
    ) as child:
        served = _served(child, "reference", chosen, hidden=("port", "drain_s"))
        yield replace(served, endpoint=served.endpoint.with_operator_token(token))


@contextmanager
def mock(
    options: Mapping[str, str], log_dir: Path, *, truth: Path | None = None
) -> Iterator[Served]:
    """The scripted mock server, serving while the `with` block runs; its log is `log_dir/mock.log`.

    `options` are those of the mock (`ttft`, `itl`, `fail`, …); `;` separates the values of a
    repeatable option. At its end it writes to `truth` a CSV of what it did and when.
    """
    flags = ["--log", str(truth.resolve())] if truth is not None else []
    for key, values in options.items():
        names = (*OPTIONS, *MOCK_SERVER_OPTIONS)
        if key.replace("-", "_") not in names:
            raise UsageError(f"unknown mock option '{key}'; {nearest(key, names)}")
        flag = "--" + key.replace("_", "-")
        flags += [part for value in values.split(";") for part in (flag, value)]
    with child_server("mock", "targets.mock_server", flags, log_dir=log_dir) as child:
        yield _served(child, "mock", options, hidden=_SECRET)


def _served(child: Child, label: str, options: Mapping[str, str], hidden: Sequence[str]) -> Served:
    flags = " ".join(f"{key}={value}" for key, value in options.items() if key not in hidden)
    return Served(Endpoint(url=child.url, labels=Labels(engine=label, flags=flags)), child)
