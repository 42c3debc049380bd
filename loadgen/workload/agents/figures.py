"""Figures of a corpus of agents, and of the plays of a plan, for `slobench preview`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from loadgen.manifest.json_section import JsonObject
from loadgen.measure.prefix_hits import ideal_hits
from loadgen.records import Pieces, Schedule
from loadgen.workload.agents.block import Agents
from loadgen.workload.agents.corpus import AgentTree, Corpus
from loadgen.workload.agents.plays import drawn_trees
from loadgen.workload.layout import RandomStreams


def agent_figures(
    agents: Agents, rows: Schedule, pieces: Pieces, streams: RandomStreams, is_closed_loop: bool
) -> JsonObject:
    """The figures of a class of agents. `planned` are those of its rows in a plan: in a closed loop
    without the working set, because the server decides when trees begin.

    `ideal_hit_rate` is the share of prompt tokens that an unlimited prefix cache of whole blocks
    has: of the corpus in order of the recorded starts, a cache per tree; of the plan in order of
    its rows. `working_set_tokens` is the largest sum of the distinct tokens that live trees have
    sent so far, if all answers take as long as recorded.
    """
    _, first = np.unique(rows["session_id"], return_index=True)
    starts_s = rows["scheduled_s"][first]
    trees = list(islice(drawn_trees(agents.corpus, streams), len(first)))
    inputs = rows["input_tokens"].sum(dtype=np.float64)
    hits = ideal_hits(rows, pieces).sum(dtype=np.float64)
    return {
        **corpus_figures(agents.corpus),
        "planned": {
            "plays": None if is_closed_loop else len(first),
            "requests": len(rows),
            "ideal_hit_rate": float(hits / inputs),
            "working_set_tokens": None if is_closed_loop else working_set(trees, starts_s),
        },
    }


def corpus_figures(corpus: Corpus) -> JsonObject:
    """Trees, requests, chains and agents; lengths, depths and times per tree or request; the ideal
    hit rate of an unlimited cache per tree."""
    trees = corpus.trees
    inputs = np.concatenate([tree.input_tokens for tree in trees])
    hits = np.concatenate([tree.hit_tokens for tree in trees])
    chains = [chain for tree in trees for chain in tree.tree.chains]
    return {
        "trees": len(trees),
        "requests": len(inputs),
        "chains": len(chains),
        "subagents": sum(tree.n_agents for tree in trees),
        "background_chains": sum(tree.tree.n_background for tree in trees),
        "deepest_chain": max(chain.depth for chain in chains),
        "ideal_hit_rate": float(hits.sum() / inputs.sum()),
        "requests_per_tree": _spread(len(tree) for tree in trees),
        "input_tokens": _spread(inputs.tolist()),
        "new_tokens": _spread((inputs - hits).tolist()),
        "output_tokens": _spread(n for tree in trees for n in tree.output_tokens.tolist()),
        "distinct_tokens_per_tree": _spread(int(tree.new_tokens.sum()) for tree in trees),
        "recorded_s": _spread(float(tree.ends_s.max()) for tree in trees),
        "notes": list(corpus.notes),
    }


def working_set(trees: Sequence[AgentTree], starts_s: NDArray[np.float64]) -> int:
    """The largest sum of tokens that trees begun at `starts_s` have sent, each token of a tree
    once, from the start of the request with it until its tree has ended."""
    times_s, tokens = [np.empty(0)], [np.empty(0, np.int64)]
    for tree, start_s in zip(trees, starts_s.tolist(), strict=True):
        times_s += [start_s + tree.starts_s, np.array([start_s + tree.ends_s.max()])]
        tokens += [tree.new_tokens, np.array([-tree.new_tokens.sum()])]
    change, at_s = np.concatenate(tokens), np.concatenate(times_s)
    order = np.lexsort((change, at_s))  # at the same instant, what ends before what begins
    return int(np.cumsum(change[order]).max(initial=0))


def _spread(values: Iterable[float]) -> dict[str, float]:
    """Median, p90 and maximum (inverted distribution)."""
    p50, p90, most = np.quantile(list(values), (0.5, 0.9, 1.0), method="inverted_cdf").tolist()
    return {"p50": p50, "p90": p90, "max": most}
