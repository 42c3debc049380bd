"""What one load-generating process is told. Apart from `shard`, whose imports the controlling
process has no use for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from loadgen.drive.dispatch import Bounds
from loadgen.drive.payloads import HttpHead
from loadgen.drive.transport import Connections
from loadgen.records import Edges, LimitsS, Schedule
from loadgen.workload.prompts import PromptFit, Prompts
from targets.base import Adapter
from targets.route import Route


@dataclass(frozen=True, repr=False)
class ShardTask:
    """Everything one shard needs, handed over once. Holds the API key in `head`: no repr."""

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
    promises: tuple[LimitsS, ...] = ()  # to each class, for a server that schedules by them
    is_watched: bool = False  # somebody wants to know of each request as it ends
