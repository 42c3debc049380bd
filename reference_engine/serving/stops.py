"""Stop strings on a stream of text: nothing that could be the beginning of one is shown early."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text through until one of `stops` is complete; the stop string itself is never
    shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""

    @property
    def is_needed(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was found."""
        if not self._stops:
            return text, False
        self._held += text
        starts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            shown, self._held = self._held[: min(starts)], ""
            return shown, True
        n_kept = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - n_kept
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """What was held back, when the stream ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, the whole of it excluded."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
