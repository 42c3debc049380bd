"""Attribution of misses while the engine serves: in a process of its own, because simulating takes
seconds of the interpreter, which the engine thread needs."""

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

_NICENESS = 10  # below the engine


class AttributionProcess:
    """Attributes the misses of a case in a child process. Cases take turns."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def misses(self, case: Case) -> list[Attribution]:
        """The misses of a case. Most causes follow from the accounts alone; other modes are
        simulated only if a miss is attributed to interference, which remains its cause if the
        child process dies."""
        if not any(map(missed_slos, case.selected)):
            return []
        misses = await asyncio.to_thread(attribute_without_simulation, case)
        if all(miss.cause is not MissCause.interference for miss in misses):
            return misses
        async with self._lock:
            return await _in_child_process(case) or misses


async def _in_child_process(case: Case) -> list[Attribution] | None:
    """The result of a child process; None if it died. The child is killed when this is
    cancelled."""
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
    misses: list[Attribution] | None = pickle.loads(out) if child.returncode == 0 else None
    return misses


def main() -> None:
    """The child process: reads a pickled case from stdin, writes its pickled misses to stdout."""
    os.nice(_NICENESS)
    sys.stdout.buffer.write(pickle.dumps(attribute_misses(pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
