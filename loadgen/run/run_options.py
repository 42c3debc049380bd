"""How a run is made, apart from what is sent (the scenario) and to whom (the target)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Watch:
    """How a run can be watched from outside: a Prometheus endpoint at `host:port` (0: a free port),
    and OpenTelemetry to a collector, "" meaning the one that the OTEL_… variables name. `show` is
    given what is to be shown of each run where several share an endpoint (`live.watching`)."""

    port: int | None = None
    host: str = "127.0.0.1"
    otlp: str | None = None
    show: Callable[[Any], None] | None = None

    @property
    def is_on(self) -> bool:
        return self.port is not None or self.otlp is not None or self.show is not None


NOBODY = Watch()


class Early(Protocol):
    """Ends a run early: `note` gets the requests that ended, `reason` says why to stop now."""

    def note(self, now_s: float, ended: Sequence[Mapping[str, Any]]) -> None: ...

    def reason(self, now_s: float, in_flight: int) -> str | None: ...


@dataclass(frozen=True)
class RunOptions:
    """What the command line, or a caller of `slobench.run`, may choose.

    `engine` are settings of a server of ours, `mode=chunked,shape=tiny`. `n_workers` 0 means:
    as many as the asked token rate needs. `transport` carries the requests: docs/connections.md.
    `command` is what the user typed, for the report. `cache_dir` keeps what is slow to make (the
    plotting bundle); None keeps nothing. `plugins` are Python files that were loaded here and must
    be in the load-generating processes too. `scrape` reads the server's own metrics once a second.
    `target_settings` are keys set on top of a target file, `launch.args=--tp 2`. `name` is what the
    run is called, if not as its directory.
    `watch` lets others read the run while it goes on; `early` ends it as soon as it is clear.
    """

    out_dir: Path | None = None
    force: bool = False
    n_workers: int = 0
    transport: Literal["fast", "aiohttp"] = "fast"
    engine: str = ""
    model: str = ""
    confidence: float | None = None
    command: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    cache_dir: Path | None = None
    plugins: Sequence[Path] = ()
    scrape: bool = True
    target_settings: Sequence[str] = ()
    name: str = ""
    watch: Watch = field(default_factory=Watch)
    early: Early | None = None
