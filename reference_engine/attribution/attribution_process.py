"""Whose fault missed promises are, judged beside a serving engine: in a process of its own, because
simulating takes seconds of the interpreter, which the engine thread needs."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from contextlib import suppress

from reference_engine.attribution.attribution import Attribution, MissCause, missed_slos
from reference_engine.attribution.counterfactual import (
    Case,
    attribute_misses,
    attribute_without_simulation,
)

_LATER = 10  # niceness: the engine goes first


class AttributionProcess:
    """Judges one case at a time; further ones wait their turn."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def misses(self, case: Case) -> list[Attribution]:
        """The misses of a case. Most are clear from the accounts alone; only what those leave to
        interference is worth simulating other modes for. Where the process comes to nothing, that
        is what they are left at."""
        if not any(map(missed_slos, case.asked)):
            return []
        found = await asyncio.to_thread(attribute_without_simulation, case)
        if all(miss.cause is not MissCause.interference for miss in found):
            return found
        async with self._turn:
            return await _beside(case) or found


async def _beside(case: Case) -> list[Attribution] | None:
    """The judgement of a child process; None if it died. It ends with whoever waits for it."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "reference_engine.attribution.attribution_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        out, _ = await child.communicate(pickle.dumps(case))
    finally:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    found: list[Attribution] | None = pickle.loads(out) if child.returncode == 0 else None
    return found


def main() -> None:
    """The child: a case on its input, the judgement on its output."""
    os.nice(_LATER)
    sys.stdout.buffer.write(pickle.dumps(attribute_misses(pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
