"""A trace with block hashes whose prompts branch at many depths."""

import json
import random

from loadgen.workload.scenario import Scenario

BLOCK_TOKENS = 20


def hashed_lists(n=120, seed=5):
    """Lists of block ids that continue a beginning of an earlier list, or begin anew."""
    rng, lists = random.Random(seed), [[0, 1, 2]]
    for k in range(1, n):
        other = rng.choice(lists)
        kept = other[: rng.randint(0, len(other))]
        lists.append([*kept, *(1000 * k + i for i in range(rng.randint(0 if kept else 1, 4)))])
    return lists


def hashed_trace(folder, **keys):
    """A scenario that replays such a trace in 12 s."""
    path = folder / "hashed.jsonl"
    rows = [
        {
            "timestamp": 100 * k,
            "input_length": BLOCK_TOKENS * len(ids) + k % BLOCK_TOKENS,
            "output_length": 3,
            "hash_ids": ids,
        }
        for k, ids in enumerate(hashed_lists())
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace_format = {"kind": "mooncake", "block_tokens": BLOCK_TOKENS}
    return Scenario.model_validate(
        {
            "name": "hashed",
            "arrivals": {"kind": "trace", "path": str(path), "format": trace_format, **keys},
            "phases": {"warmup": "0s", "measure": "24s" if keys.get("loop") else "12s"},
        }
    )
