"""Measures how often the interval of a capacity search over agents holds a known capacity.

    python benchmarks/agent_capacity.py [--seeds 50] [--first 0] [--trees] [--keep]

Every agent plays the same tree: turns with a constant pause after each, also after the last, whose
prompts extend the prompt before. The simulated engine has KV for exactly K such trees at their end.
In turns with equal pauses, all agents use their KV in the same order again and again, so that a
cache that drops the least recently used blocks keeps everything up to K agents. From K + 1 on, it
drops what the next agent needs. The limit of TTFT is half the time of a cold prefill, so K agents
meet the SLO and K + 1 miss it.

Each seed draws K, the shape of the tree, its pauses, the number of agents at which the search
starts, and the scenario's seed. The probes are those of `slobench capacity --over agents --target
sim`, without their pages. By default requests are counted: the first of a tree is always
cold, less than the tenth that may miss. With `--trees`, trees are counted: their first prompt is
short, so that only evicted prompts miss the limit.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rig.machine import keep

from loadgen.lab.sim_options import read_settings
from loadgen.lab.simulate import simulate
from loadgen.measure.aggregate import summarize
from loadgen.measure.per_request import per_request
from loadgen.run.execute import FinishedRun
from loadgen.run.run_options import RunOptions
from loadgen.studies.capacity.run import search
from loadgen.studies.capacity.spec import CapacitySpec
from loadgen.workload.scenario import Scenario

_BLOCK = 64
_ENGINE = "shape=8b,hardware=h100,mode=chunked,token_budget=32768"
_ATTAINMENT = 0.9
_ANSWER = 2  # tokens


@dataclass(frozen=True)
class Tree:
    """A tree of one chain: prompts of `first` tokens, then `more` in each turn, all multiples of a
    block; answers of `answer` tokens, and pauses of `pause_s`."""

    turns: int
    first: int
    more: int
    answer: int
    pause_s: float

    @property
    def tokens(self) -> int:
        """The distinct tokens of a tree at its end, with the answer."""
        return self.first + (self.turns - 1) * self.more + self.answer

    def write(self, path: Path) -> None:
        """The tree as a conversation in Weka's format."""
        requests = []
        for turn in range(self.turns):
            tokens = self.first + turn * self.more
            requests.append(
                {
                    "t": turn * (1.0 + self.pause_s),
                    "type": "s",
                    "model": "m",
                    "in": tokens,
                    "out": self.answer,
                    "hash_ids": list(range(tokens // _BLOCK)),
                    "api_time": 1.0,
                }
            )
        path.write_text(json.dumps({"id": "a", "block_size": _BLOCK, "requests": requests}))


def drawn(rng: np.random.Generator, counts_trees: bool) -> tuple[Tree, int, int]:
    """A tree, the number of trees that the KV holds, and that at which the search starts."""
    if counts_trees:
        first, more, turns = 1024, 1024, int(rng.integers(14, 21))
        n_held = int(rng.integers(2, 6))
    else:
        first, more = _BLOCK * int(rng.integers(256, 385)), _BLOCK * int(rng.integers(1, 4))
        turns, n_held = int(rng.integers(15, 26)), int(rng.integers(2, 11))
    tree = Tree(turns, first, more, _ANSWER, float(rng.integers(10, 61)))
    return tree, n_held, int(rng.integers(1, 2 * n_held + 1))


def scenario_of(tree: Tree, path: Path, n_agents: int, limit_s: float, **keys: Any) -> Scenario:
    task_s = tree.turns * (1.0 + tree.pause_s)
    return Scenario.model_validate(
        {
            "name": "identical-agents",
            "arrivals": {"kind": "users", "users": n_agents, "think": f"{tree.pause_s}s"},
            "agents": {"path": str(path)},
            "phases": {"warmup": f"{task_s}s", "measure": f"{2 * task_s}s"},
            "limits": {"timeout": "10m"},
            "slo": [f"ttft <= {limit_s}s"],
            **keys,
        }
    )


def cold_prefill_s(tree: Tree, directory: Path) -> float:
    """The TTFT of the tree's last prompt, or, where its first is longer than half of it, of the
    first, in an empty engine."""
    is_first = tree.first > tree.tokens / 2
    tokens = tree.first if is_first else tree.tokens - tree.answer
    path = directory / "cold.json"
    Tree(1, tokens // _BLOCK * _BLOCK, _BLOCK, _ANSWER, 1.0).write(path)
    settings: dict[str, Any] = dict(item.split("=") for item in _ENGINE.split(","))
    run = simulate(scenario_of(tree, path, 1, 1.0), **settings, block_tokens=str(_BLOCK))
    return float(np.nanmedian(per_request(run).ttft_s))


def simulated(
    scenario: Scenario, _target: str, options: RunOptions, _console: Console
) -> FinishedRun:
    """A probe without its page."""
    settings: dict[str, Any] = read_settings(options.engine)
    run = simulate(scenario, **settings)
    return FinishedRun(run, summarize(run), Path())


def measure(seed: int, counts_trees: bool) -> dict[str, Any]:
    """A search with everything drawn from a seed."""
    tree, n_held, start = drawn(np.random.default_rng(seed), counts_trees)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tree.write(directory / "tree.json")
        limit_s = cold_prefill_s(tree, directory) / 2
        share = "attainment(tree)" if counts_trees else "attainment"
        slo = [f"ttft <= {limit_s}s", f"{share} >= {100 * _ATTAINMENT:g}%"]
        scenario = scenario_of(tree, directory / "tree.json", start, limit_s, slo=slo, seed=seed)
        n_blocks = n_held * math.ceil(tree.tokens / _BLOCK)
        engine = f"{_ENGINE},block_tokens={_BLOCK},kv_blocks={n_blocks}"
        spec = CapacitySpec(scenario, "sim", RunOptions(engine=engine), "agents")
        found = search(
            spec, directory / "search", Console(quiet=True), resume=False, execute_run=simulated
        )
    return {
        "seed": seed,
        "agents_held": n_held,
        "start": start,
        "turns": tree.turns,
        "tokens": tree.tokens,
        "pause_s": tree.pause_s,
        "limit_s": round(limit_s, 4),
        "outcome": found.outcome,
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "holds": found.low is not None and found.high is not None
        and found.low <= n_held <= found.high,
        "probes": len(found.probes),
        "virtual_h": round(found.spent_s / 3600, 1),
        "wall_s": round(time.monotonic() - begin_s, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trees", action="store_true")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(options.first, options.first + options.seeds):
        rows.append(measure(seed, options.trees))
        print(json.dumps(rows[-1]), flush=True)
        if options.keep:  # after each search, so that an interrupted benchmark has a result
            name = "agent_capacity_trees" if options.trees else "agent_capacity"
            keep(name, {"seeds": options.seeds, "first": options.first}, result_of(rows))
    shown = {key: value for key, value in result_of(rows).items() if key != "rows"}
    print(json.dumps(shown, indent=2))


def result_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The number of searches, of intervals that hold the known capacity and of estimates that
    equal it, and the widest of these intervals."""
    return {
        "searches": len(rows),
        "held": sum(row["holds"] for row in rows),
        "value_is_known": sum(row["value"] == row["agents_held"] for row in rows),
        "widest_agents": max((r["high"] - r["low"] for r in rows if r["holds"]), default=None),
        "rows": list(rows),
    }


if __name__ == "__main__":
    main()
