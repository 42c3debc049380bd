"""A run of the bundled engine, decided once more from its own log."""

from __future__ import annotations

from pathlib import Path

from reference_engine.step_log.log_replay import Replay
from reference_engine.step_log.log_replay import replay as decide_again
from reference_engine.step_log.step_files import read_log


def replay(directory: Path | str) -> Replay:
    """Whether the engine decides the same again: its steps and events, in a run's directory or in
    its own `--log-dir`, go through the same core and the same policies, at the instants and with
    the answers of the log. Raises UsageError for a log that does not hold enough
    (`log_level=full` does)."""
    return decide_again(read_log(Path(directory)))
