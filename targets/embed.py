"""Servers of ours as targets: the bundled engine and the scripted mock, each a child process for
the length of a run.

    with engine({"mode": "chunked", "shape": "tiny"}, run_dir / "logs") as served:
        measure(served.endpoint)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import UsageError, nearest
from targets.child import Child, child_server
from targets.endpoint import Endpoint, Labels
from targets.mock_script import OPTIONS, split_options

ENGINE_DEFAULTS: Mapping[str, str] = {
    "mode": "chunked",
    "shape": "tiny",
    "device": "cpu",
    "threads": "1",  # so that it cannot starve the client on the same machine
    "port": "0",
    "drain_s": "2",  # whatever still runs when a run is over is nobody's any more
}
MOCK_SERVER_OPTIONS = ("host", "port", "tls_cert", "tls_key", "unix")
_SECRET = ("api_key", "api-key")  # labels reach the manifest


@dataclass(frozen=True)
class Served:
    """A server of ours that is up: what to measure, and the process behind it."""

    endpoint: Endpoint
    child: Child


def parse_engine(text: str) -> dict[str, str]:
    """Options from `mode=chunked,shape=tiny,watermark=0.05`: the engine's, and knobs of its mode.

    Names and values are the engine's to check: it ends with one line when it cannot serve them.
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
    """The bundled engine, serving while the `with` block runs. `log_dir` gets its log,
    `engine.log`, and when it ends its steps and events (Parquet). `plugins` are Python files with
    modes of the user's.

    Raises MissingDependency (no torch), UsageError (a bad option, a busy port) or TargetError (it
    died, it never got ready), each in one line of the engine's own words.
    """
    chosen = {**ENGINE_DEFAULTS, **options}
    flags = [part for key, value in chosen.items() for part in ("--set", f"{key}={value}")]
    flags += ["--log-dir", str(log_dir.resolve())]
    flags += [part for path in plugins for part in ("--plugin", str(path.resolve()))]
    with child_server(
        "engine", "reference_engine", flags, log_dir=log_dir, ready_timeout_s=ready_timeout_s
    ) as child:
        shown = {key: value for key, value in chosen.items() if key not in ("port", "drain_s")}
        said = " ".join(f"{key}={value}" for key, value in shown.items())
        yield Served(Endpoint(url=child.url, labels=Labels(engine="reference", flags=said)), child)


@contextmanager
def mock(
    options: Mapping[str, str], log_dir: Path, *, truth: Path | None = None
) -> Iterator[Served]:
    """The scripted mock server, serving while the `with` block runs; its log is `log_dir/mock.log`.

    `options` are the mock's (`ttft`, `itl`, `fail`, …), a repeatable one several times with `;`
    between. `truth` is where it writes, when it ends, the CSV of what it really did.
    """
    flags = ["--log", str(truth.resolve())] if truth is not None else []
    for key, values in options.items():
        known = (*OPTIONS, *MOCK_SERVER_OPTIONS)
        if key.replace("-", "_") not in known:
            raise UsageError(f"unknown mock option '{key}'; {nearest(key, known)}")
        flags += [part for value in values.split(";") for part in (_flag(key), value)]
    with child_server("mock", "targets.mock_server", flags, log_dir=log_dir) as child:
        shown = {key: value for key, value in options.items() if key not in _SECRET}
        said = " ".join(f"{key}={value}" for key, value in shown.items())
        yield Served(Endpoint(url=child.url, labels=Labels(engine="mock", flags=said)), child)


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
