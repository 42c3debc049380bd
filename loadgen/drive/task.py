"""Task of a load-generating process. A module of its own, so that the controlling process does
not import `shard`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadgen.drive.dispatch import Bounds
from loadgen.drive.payloads import HttpHead
from loadgen.drive.transport import Connections
from loadgen.records import Edges, LimitsS, Schedule
from loadgen.workload.more_units import MoreUnits
from loadgen.workload.prompts import PromptFit, Prompts
from targets.base import Adapter
from targets.route import Route


@dataclass(frozen=True, repr=False)
class ShardTask:
    """Everything that a shard needs, sent to it once. No repr: `head` holds the API key."""

    shard: int
    schedule: Schedule
    edges: Edges
    route: Route
    head: HttpHead
    adapter: Adapter
    prompts: Prompts
    fit: PromptFit
    run_name: str
    tenants: tuple[str, ...]
    bounds: Bounds
    transport: Literal["fast", "aiohttp"]
    connections: Connections
    n_preopen: int
    part_path: Path
    slo_limits_s: tuple[LimitsS, ...] = ()  # by class_id, for servers that schedule by them
    decodes_meanwhile: bool = False  # in a process of its own, for which a core is idle
    more: MoreUnits | None = None  # for users of a closed loop who get through their rows
    has_exact_lengths: bool = False  # the server accepted them: shorter answers are truncated
    is_watched: bool = False  # whether to report gaps between tokens, for live metrics
