"""The scenario block `agents`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

from pydantic import Field

from loadgen.registry import Strict
from loadgen.workload.agents.corpus import Corpus
from loadgen.workload.agents.load import AgentFormat, load_corpus


class Agents(Strict):
    """Agents that replay recorded conversations: every arrival plays a whole tree of requests, with
    its tools' pauses and subagents. Each tree of the corpus is played once, in an order drawn from
    the seed, before any is played again.

    `path` is a file, or a folder with files, relative to the current directory.
    """

    path: Annotated[str, Field(min_length=1)]
    format: AgentFormat = "auto"

    @cached_property
    def corpus(self) -> Corpus:
        """Reads the files. Raises TraceFileError if that fails."""
        return load_corpus(self.path, self.format)
