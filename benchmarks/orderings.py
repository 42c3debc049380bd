"""The three orderings that batching modes are for, shown by `slobench modes` as a user calls it.

    python benchmarks/orderings.py [--on cpu|sim|sim-cpu] [--seeds 3] [--write]

`cpu` is the real engine with the shape `tiny` on one core, started afresh for every mode and seed
(13 minutes for three seeds); `sim` an 8B model on one H200, `sim-cpu` the cost model of `tiny`.
Ratios are per seed, of the same requests under two modes:
- tokens per second of `continuous` over `static` batches of 32 with masked rows, more than 1.5;
- p99 of the gaps between tokens under `chunked` over `prefill_first`, less than 0.2;
- p99 of the TTFT of short prompts under `bucketed` over `chunked`, less than 0.2.
`continuous` has the slots it has by default, for what is promised is what a user gets by choosing
it: rows of all ages, and more of them. How much of that is joining and leaving alone is a row for
the record, `continuous` with 32 slots over `static`, which nothing is asked of. Answers of U(50,
1000) tokens leave it 1.85 (the longest of 32 over the mean) if a step costs the same whatever it
holds; each admission costs some of that, and static rows that grow old together add to it.
`--write` keeps the result with the machine and its load. Exits 1 when a seed misses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rig.machine import machine

RESULTS = Path(__file__).parent / "results"
Cells = dict[tuple[str, int], dict[str, Any]]  # by mode and seed


class Place(NamedTuple):
    """Where the modes are compared: flags of `slobench modes`, which scenarios, which budget."""

    flags: tuple[str, ...]
    suffix: str
    token_budget: int


PLACES = {
    "cpu": Place(("--target", "reference", "--engine", "shape=tiny"), "_cpu", 64),
    "sim": Place(("--engine", "shape=8b,hardware=h200"), "", 512),
    "sim-cpu": Place(("--engine", "shape=tiny,hardware=cpu"), "_cpu", 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", choices=PLACES, default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep the comparisons, and go on from them")
    parser.add_argument("--write", action="store_true", help="keep it in benchmarks/results")
    asked = parser.parse_args()
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        found = orderings(PLACES[asked.on], asked.seeds, asked.out or Path(scratch))
    for row in found:
        print(text(row))
    if asked.write:
        this_machine = machine()
        kept = {
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "machine": {**this_machine, "load_before": round(load_before, 2)},
            "on": asked.on,
            "orderings": found,
        }
        path = RESULTS / f"orderings_{asked.on.replace('-', '_')}.json"
        path.write_text(json.dumps(kept, indent=2) + "\n")
    sys.exit(any(row["is_met"] is False for row in found))


def orderings(place: Place, n_seeds: int, out: Path) -> list[dict[str, Any]]:
    static, continuous, as_many = "static", "continuous", "continuous:max_num_seqs=32"
    budget = f"token_budget={place.token_budget}"
    chunked, bucketed = f"chunked:{budget}", f"bucketed:{budget}"
    uneven = cells(
        f"uneven_answers{place.suffix}", (static, continuous, as_many), place, n_seeds, out
    )
    modes = ("prefill_first", chunked, bucketed)
    mixed = cells(f"long_prompt_interference{place.suffix}", modes, place, n_seeds, out)
    rate = "output_tokens_per_s"
    return [
        ordering(uneven, rate, "", continuous, static, more_than=1.5),
        ordering(uneven, rate, "", as_many, static),
        ordering(mixed, "itl_p99", "", chunked, "prefill_first", less_than=0.2),
        ordering(mixed, "ttft_p99", "short", bucketed, chunked, less_than=0.2),
    ]


def cells(scenario: str, modes: tuple[str, ...], place: Place, n_seeds: int, out: Path) -> Cells:
    """What `slobench modes` says of each mode and seed."""
    command = [
        *(sys.executable, "-m", "loadgen", "modes", scenario, "--modes", ",".join(modes)),
        *(*place.flags, "--seeds", str(n_seeds), "--out", str(out / scenario), "--json"),
        *(("--resume",) if (out / scenario / "study.json").exists() else ()),
    ]
    print(f"$ slobench {' '.join(command[3:])}", file=sys.stderr, flush=True)
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if ended.returncode:  # it has said why
        sys.exit(ended.returncode)
    facts = json.loads(ended.stdout)
    return {(cell["mode"].replace(" ", ":"), cell["seed"]): cell for cell in facts["cells"]}


def ordering(
    found: Cells,
    quantity: str,
    of_class: str,
    ours: str,
    theirs: str,
    more_than: float = 0.0,
    less_than: float = math.inf,
) -> dict[str, Any]:
    """Seed by seed `ours` over `theirs`; a value that is missing or infinite is a miss. Without a
    bound there is nothing to miss: `is_met` is None."""
    seeds = sorted({seed for _, seed in found})
    ratios = []
    for seed in seeds:
        a, b = (value(found[mode, seed], quantity, of_class) for mode in (ours, theirs))
        ratios.append(None if a is None or not b else round(a / b, 4))
    below = f"< {less_than:g}" if less_than < math.inf else ""
    wanted = f"> {more_than:g}" if more_than else below
    is_within = all(ratio is not None and more_than < ratio < less_than for ratio in ratios)
    return {
        "quantity": f"{quantity} of {of_class}" if of_class else quantity,
        "ratio": f"{ours} / {theirs}",
        "wanted": wanted,
        "seeds": seeds,
        "ratios": ratios,
        "values": {
            mode: [value(found[mode, seed], quantity, of_class) for seed in seeds]
            for mode in (ours, theirs)
        },
        "is_trusted": all(found[m, s]["is_trusted"] for m in (ours, theirs) for s in seeds),
        "is_met": is_within if wanted else None,
    }


def value(cell: dict[str, Any], quantity: str, of_class: str) -> float | None:
    part = cell["classes"][of_class] if of_class else cell
    found: float | None = part[quantity]["value"]
    return found


def text(row: dict[str, Any]) -> str:
    ratios = "  ".join("-" if ratio is None else f"{ratio:.3g}" for ratio in row["ratios"])
    doubt = "" if row["is_trusted"] else "  (the client was disturbed: see the runs)"
    verdict = {True: "met", False: "MISSED", None: ""}[row["is_met"]]
    return f"{row['quantity']:22} {row['ratio']:52} {row['wanted']:6} {verdict:6} {ratios}{doubt}"


if __name__ == "__main__":
    main()
