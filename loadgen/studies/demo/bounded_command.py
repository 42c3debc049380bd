"""Commands that run for a bounded time, each in a process group of its own, with the CPU time and
the memory that they took."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_S = 0.5
_GRACE_S = 5.0
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True)
class Finished:
    """A command that has ended: its output (stdout, followed by stderr), its exit status (negative:
    the signal that ended it), its CPU time, the memory of its processes (`Memory`), its start and
    end on CLOCK_MONOTONIC, and whether it was ended because it ran for too long."""

    output: str
    exit_code: int
    cpu_s: float
    peak_mb: float
    started_s: float
    ended_s: float
    is_cut: bool = False


def finished(words: Sequence[str], environ: Mapping[str, str], limit_s: float = 300.0) -> Finished:
    """Runs a command to its end, at most `limit_s`. `environ` is added to the environment.

    At the limit, and on an interrupt of this thread, its process group gets SIGTERM, and SIGKILL 5
    s later. What is left of the group when the command has ended is killed. Raises OSError for a
    program that cannot be started.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        started_s = time.monotonic()
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=dict(os.environ) | dict(environ),
            start_new_session=True,  # a Ctrl-C at the terminal reaches only this process
        )
        memory, is_cut = Memory(child.pid), threading.Event()

        def cut() -> None:
            is_cut.set()
            _signal_group(child.pid, signal.SIGTERM)

        limits = [
            threading.Timer(limit_s, cut),
            threading.Timer(limit_s + _GRACE_S, _signal_group, (child.pid, signal.SIGKILL)),
        ]
        for limit in limits:
            limit.start()
        try:
            # Not reaped yet, so that its number stays that of its group.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            _end_group(child.pid)
            raise
        finally:
            ended_s = time.monotonic()
            for limit in limits:
                limit.cancel()
            _signal_group(child.pid, signal.SIGKILL)
            peak_mb = memory.stop()
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Finished(
        output="".join(texts),
        exit_code=child.returncode,
        cpu_s=used.ru_utime + used.ru_stime,
        peak_mb=peak_mb,
        started_s=started_s,
        ended_s=ended_s,
        is_cut=is_cut.is_set(),
    )


def _end_group(leader: int) -> None:
    """SIGTERM, and the time to end after it."""
    _signal_group(leader, signal.SIGTERM)
    killer = threading.Timer(_GRACE_S, _signal_group, (leader, signal.SIGKILL))
    killer.start()
    os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)
    killer.cancel()


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


class Memory:
    """The sum of the peak resident memory of a process and its descendants, read twice a second.
    Memory that processes share counts in each. `ru_maxrss` will not do: a process starts with that
    of the process that forked it."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peaks_kb = pid, dict[int, int]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> float:
        """MB."""
        self._ended.set()
        self._thread.join()
        return sum(self._peaks_kb.values()) / 1024

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for pid in _family(self._pid):
                with contextlib.suppress(OSError):  # it has ended
                    found = _PEAK.search(Path(f"/proc/{pid}/status").read_text())
                    if found is not None:
                        self._peaks_kb[pid] = int(found[1])


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):  # it has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            yield from _family(int(child))
