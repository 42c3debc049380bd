"""From the word after `--target` to something that answers: a URL, a file, or a server of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from loadgen.errors import TargetError, UsageError, nearest
from loadgen.records import Schedule
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from targets.base import Adapter
from targets.endpoint import Endpoint, load_target

if TYPE_CHECKING:
    from loadgen.run import RunOptions

OURS = ("reference", "mock")
