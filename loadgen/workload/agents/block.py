"""The scenario block `agents`."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from loadgen.fields import Seconds
from loadgen.registry import Strict
from loadgen.workload.lengths import Tokens

if TYPE_CHECKING:
    from loadgen.workload.agents.corpus import Corpus

AgentFormat = Literal["auto", "weka", "trajectories"]


class IdleCap(Strict):
    """The longest time in which no request of a tree is in flight; longer pauses are shortened to
    it, and everything after them begins earlier."""

    of: Literal["tree"] = "tree"
    at_most: Annotated[Seconds, Field(gt=0)]


class Agents(Strict):
    """Agents that replay recorded conversations: every arrival plays a whole tree of requests, with
    its tools' pauses and subagents. Each tree of the corpus is played once, in an order drawn from
    the seed, before any is played again.

    `path` is a file, or a folder with files, relative to the current directory. A tree ends before
    its first request with more than `max_context` tokens of prompt and answer, which a server with
    this limit would refuse.
    """

    path: Annotated[str, Field(min_length=1)]
    format: AgentFormat = "auto"
    max_context: Tokens | None = None
    idle_cap: IdleCap | None = None

    @cached_property
    def corpus(self) -> Corpus:
        """Reads the files. Raises TraceFileError if that fails."""
        from loadgen.workload.agents.corpus import without_idle
        from loadgen.workload.agents.load import load_corpus  # no other scenario needs them

        corpus = load_corpus(self.path, self.format, self.max_context)
        if self.idle_cap is None:
            return corpus
        at_most_s = self.idle_cap.at_most
        return replace(corpus, trees=tuple(without_idle(t, at_most_s) for t in corpus.trees))
