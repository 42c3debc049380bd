"""A request on the engine thread's side: from its tokens to the text that may be shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from reference_engine.serving.streams import Sink, StreamDelta
from reference_engine.serving.wire.response import Chosen
from reference_engine.state.sequence import Request, State
from reference_engine.state.tokenizer import Detokenizer

# Half the price of calling the class.
_DELTA = partial(tuple.__new__, StreamDelta)


class ActiveRequest:
    """One answer under way: its text so far and the stream it goes to."""

    __slots__ = ("_detokenizer", "_is_plain", "_n_chars", "_stops", "request", "stream", "token_s")

    def __init__(
        self, request: Request, stream: Sink, detokenizer: Detokenizer, stops: StopText
    ) -> None:
        self.request, self.stream = request, stream
        self.token_s: float | None = None  # when its last token came
        self._detokenizer, self._stops = detokenizer, stops
        self._n_chars = 0
        self._is_plain = not (stops.is_needed or request.sampling.logprobs)

    @property
    def may_stop(self) -> bool:
        """Whether its text may end it, before the engine would."""
        return self._stops.is_needed

    def delta(self, token: int, finish: State | None, logprob: float | None) -> StreamDelta:
        """What a token adds. A stop string ends the answer although the engine goes on: then there
        is a finish reason and `finish` was None."""
        request = self.request
        n_output = len(request.tokens) - request.n_prompt
        if finish is None and self._is_plain:
            return _DELTA((self._detokenizer.push(token), n_output, None, None))
        # A stop token is counted and has no text.
        text = "" if finish is State.finished_stop else self._detokenizer.push(token)
        chosen = None if logprob is None else Chosen(text, self._n_chars, logprob)
        self._n_chars += len(text)
        if finish is not None:
            text += self._detokenizer.flush()
        if n_output > request.min_tokens:
            text, is_stopped = self._stops.push(text)
            if is_stopped:
                finish = State.finished_stop
            elif finish is not None:
                text += self._stops.flush()
        return StreamDelta(text, n_output, None if finish is None else finish.value, chosen)


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
