"""Attribution of misses while the engine serves: in a process of its own, because simulating takes
seconds of the interpreter, which the engine thread needs."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass

from reference_engine.attribution.attribution import Attribution, MissCause, missed_slos
from reference_engine.attribution.counterfactual import (
    Case,
    attribute_misses,
    attribute_without_simulation,
)

_NICENESS = 10  # below the engine
_RESULT = b"result\n"


@dataclass(frozen=True, slots=True)
class FoundMisses:
    """The misses of a case. Until `is_complete`, other modes are still being simulated
    (`n_simulated_steps` so far), and a miss attributed to interference may later be attributed to
    the policy."""

    misses: list[Attribution]
    is_complete: bool = True
    n_simulated_steps: int = 0


class AttributionProcess:
    """Attributes the misses of a case in a child process. Cases take turns. A case that takes
    longer than `patience_s` goes on after the answer; the next call for the same requests returns
    its result, once."""

    def __init__(self, patience_s: float = 1.5) -> None:
        self._patience_s = patience_s
        self._turn = asyncio.Lock()
        self._jobs: dict[str | None, _Job] = {}  # by `Case.only`

    async def misses(self, case: Case) -> FoundMisses:
        """The misses of a case, or the causes found within `patience_s` (seconds)."""
        if not any(map(missed_slos, case.selected)):
            return FoundMisses([])
        job = self._jobs.get(case.only)
        if job is None:
            job = self._jobs[case.only] = _Job(case, self._turn)
        await asyncio.wait([job.task], timeout=self._patience_s)
        if not job.task.done():
            return FoundMisses(job.first, False, job.n_simulated_steps)
        self._jobs.pop(case.only, None)
        return FoundMisses(job.task.result(), True, job.n_simulated_steps)


class _Job:
    """The attribution of a case: `first` by the accounts alone, then by its child process."""

    def __init__(self, case: Case, turn: asyncio.Lock) -> None:
        self.first: list[Attribution] = []
        self.n_simulated_steps = 0
        self.task = asyncio.create_task(self._run(case, turn))

    async def _run(self, case: Case, turn: asyncio.Lock) -> list[Attribution]:
        """Most causes follow from the accounts alone; other modes are simulated only if a miss is
        attributed to interference, which remains its cause if the child process dies."""
        self.first = await asyncio.to_thread(attribute_without_simulation, case)
        if all(miss.cause is not MissCause.interference for miss in self.first):
            return self.first
        async with turn:
            return await self._in_child_process(case) or self.first

    async def _in_child_process(self, case: Case) -> list[Attribution] | None:
        """The result of a child process; None if it died. The child is killed when this is
        cancelled."""
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "reference_engine.attribution.attribution_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert child.stdin is not None, "stdin is a pipe"
        assert child.stdout is not None, "stdout is a pipe"
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                child.stdin.write(pickle.dumps(case))
                await child.stdin.drain()
            child.stdin.close()
            async for line in child.stdout:
                if line == _RESULT:
                    break
                self.n_simulated_steps = int(line)
            out = await child.stdout.read()
            await child.wait()
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        misses: list[Attribution] | None = pickle.loads(out) if child.returncode == 0 else None
        return misses


def main() -> None:
    """The child process: reads a pickled case from stdin. Writes the number of simulated steps, a
    line each time, then `_RESULT` and the pickled misses to stdout."""
    os.nice(_NICENESS)
    out = sys.stdout.buffer

    def report(n_steps: int) -> None:
        out.write(b"%d\n" % n_steps)
        out.flush()

    misses = attribute_misses(pickle.load(sys.stdin.buffer), report)
    out.write(_RESULT + pickle.dumps(misses))


if __name__ == "__main__":
    main()
