"""How much load one core can make and read: closed loop at full speed, and paced.

    python benchmarks/generator_ceiling.py [--rounds 3] [--quick] [--tokens 64] [--write]

Three clients take turns on one core against the C server of targets/truth on another. *Saturated*:
users without a pause, a server as fast as it can, 1 and 8 tokens per write; the server itself is
near its limit then. *Two workers* share the one core at a rate that one of them holds: what it
costs to divide the work, and whether every row is there once. *Paced*: the highest rate of a ladder
at which TTFT error and send lateness stay below 5 ms at p99, one token per write; *packed*, with
8 per write, by two slobench workers on the one core and by the C client. Exit status 1 where
slobench misses a goal. `--quick` takes three minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fidelity import SCRIPT, errors
from rig.clients import OTHER_EVENTS, SIDES, Load, Measured, Rig
from rig.machine import Goal, Table, interleaved, keep, machine_line, show, spread, spreads

USERS = {1: 320, 8: 1600}  # more than a plan for 20 ms and 1000 tokens/s per user runs dry with
FLOOR = {1: 0.9, 8: 0.7}  # of the C client's events/s
LADDER = (400, 800, 1200, 1500, 1600, 2000, 2400)  # requests/s
QUICK_LADDER = (800, 1200, 1500, 1600)
LIMIT_MS = 5.0
PACKED = 8  # tokens per write
PACKED_WORKERS = {"slobench": 2, "C": 1}
Figures = dict[str, float]


def speed(found: Measured) -> Figures:
    """Events and requests per second of a run, and what an event cost."""
    span_s = float(found.rows["done_s"].max() - found.rows["sent_s"].min())
    return {
        "events/s": found.n_events / span_s,
        "requests/s": len(found.rows["seq"]) / span_s,
        "CPU µs/event": 1e6 * found.paced_cpu_s / found.n_events,
        "not answered": float(found.n_sent - len(found.rows["seq"])),
    }


def saturated(
    rig: Rig, sides: Sequence[str], burst: int, tokens: int, for_s: float, n_rounds: int
) -> tuple[dict[str, Table], list[Goal]]:
    """The table at so many tokens per write, and how slobench stands to the C client."""
    load, rounds = Load(tokens, for_s, users=USERS[burst]), defaultdict[str, list[Figures]](list)

    def one(side: str, number: int) -> None:
        rounds[side].append(speed(rig.measure(side, load, ttft_s=0.0, itl_s=0.0, burst=burst)))

    interleaved(n_rounds, sides, one)
    table: dict[str, Table] = {side: spreads(rounds[side]) for side in sides}
    if not {"slobench", "C"} <= set(sides):
        return table, []
    ratios = [
        a["events/s"] / b["events/s"] for a, b in zip(rounds["slobench"], rounds["C"], strict=True)
    ]
    name = f"saturated, {burst} per write, × C"
    return table, [Goal(name, spread(ratios)["median"], FLOOR[burst], is_floor=True)]


def two_workers(
    rig: Rig, tokens: int, for_s: float, n_rounds: int
) -> tuple[dict[str, Table], list[Goal]]:
    """One and two workers on one core at 400 requests/s."""
    load, rounds = Load(tokens, for_s, 400.0), defaultdict[str, list[Figures]](list)
    missing = [0]

    def one(side: str, number: int) -> None:
        found = rig.measure("slobench", load, workers=int(side[0]), **SCRIPT)
        rounds[side].append(speed(found))
        seen = found.log.rows["seq"]
        missing[0] += len(np.setxor1d(seen[seen >= 0], found.rows["seq"]))
        missing[0] += len(found.rows["seq"]) - len(np.unique(found.rows["seq"]))

    sides = ("1 worker", "2 workers")
    interleaved(n_rounds, sides, one)
    ratios = [
        two["CPU µs/event"] / one["CPU µs/event"]
        for one, two in zip(rounds[sides[0]], rounds[sides[1]], strict=True)
    ]
    return {side: spreads(rounds[side]) for side in sides}, [
        Goal("CPU per event, two workers, × one", spread(ratios)["median"], 1.1),
        Goal("rows not in both records once", float(missing[0]), 0.0),
    ]


def holds(found: Measured) -> bool:
    """Whether a rate was measured truly, whatever the client itself thinks of it."""
    figures = errors(found)
    worst_ms = max(figures["TTFT error p99 ms"], figures["send lateness p99 ms"])
    return not figures["not answered"] and worst_ms < LIMIT_MS


def paced_ceiling(
    rig: Rig,
    side: str,
    tokens: int,
    for_s: float,
    ladder: Sequence[int],
    workers: int = 1,
    burst: int = 1,
) -> float:
    """Events/s of the highest step of the ladder that held; each step may fail once."""
    best = 0.0
    for rate_per_s in ladder:
        load = Load(tokens, for_s, float(rate_per_s))
        for _ in range(2):
            if holds(rig.measure(side, load, workers, burst=burst, **SCRIPT)):
                best = rate_per_s * (tokens + OTHER_EVENTS)
                break
        else:
            return best
    return float(best)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="one round, the upper steps of the ladder"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    n_rounds, for_s = (1, 2.0) if asked.quick else (asked.rounds, 3.0)
    ladder, sides = QUICK_LADDER if asked.quick else LADDER, asked.sides.split(",")
    print(machine_line())
    kept, goals = {}, list[Goal]()
    with tempfile.TemporaryDirectory() as name:
        rig = Rig(Path(name))
        for burst in USERS:
            table, found = saturated(rig, sides, burst, asked.tokens, for_s, n_rounds)
            kept[f"saturated, {burst} per write"], goals = table, goals + found
            show(
                f"saturated, {burst} tokens per write, {n_rounds} rounds of {for_s:g} s: "
                "median [min, max]",
                sides,
                table,
            )
        if "slobench" in sides:
            table, found = two_workers(rig, asked.tokens, for_s, n_rounds)
            kept["two workers"], goals = table, goals + found
            show("400 requests/s on one core", list(table), table)
        ceilings = {side: paced_ceiling(rig, side, asked.tokens, for_s, ladder) for side in sides}
        packed = {
            side: paced_ceiling(rig, side, asked.tokens, for_s, ladder, workers, PACKED)
            for side, workers in PACKED_WORKERS.items()
            if side in sides
        }
    print("\nhighest paced events/s, errors below 5 ms:", ceilings)
    print(f"… packed, {PACKED} per write, slobench with two workers:", packed)
    if "slobench" in ceilings:
        goals.append(Goal("paced events/s", ceilings["slobench"], 100_000, is_floor=True))
        name = "paced events/s, packed, two workers"
        goals.append(Goal(name, packed["slobench"], 100_000, is_floor=True))
    print(*goals, sep="\n")
    if asked.write:
        found_all = {
            **kept,
            "paced": ceilings,
            "packed": packed,
            "goals": [goal.to_json() for goal in goals],
        }
        print(f"\n{keep('generator_ceiling', vars(asked), found_all)}")
    return int(not all(goal.met for goal in goals))


if __name__ == "__main__":
    sys.exit(main())
