"""A running request on the engine thread: turns its tokens into the text that may be sent."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from reference_engine.serving.streams import Sink, StreamDelta
from reference_engine.serving.wire.response import Chosen
from reference_engine.state.batch import Logprob
from reference_engine.state.sequence import Request, State
from reference_engine.state.tokenizer import Tokenizer, token_text

# Creates a StreamDelta in half the time of calling the class.
_DELTA = partial(tuple.__new__, StreamDelta)


class ActiveRequest:
    """A request, its stream, and the state of its text."""

    __slots__ = (
        *("_detokenizer", "_is_plain", "_n_chars", "_n_output", "_stops", "_tokenizer"),
        *("request", "stream", "token_s"),
    )

    def __init__(
        self, request: Request, stream: Sink, tokenizer: Tokenizer, stops: StopText
    ) -> None:
        self.request, self.stream = request, stream
        self.token_s: float | None = None  # time of its last token
        self._tokenizer, self._detokenizer = tokenizer, tokenizer.detokenizer()
        self._stops = stops
        self._n_chars = self._n_output = 0
        self._is_plain = not (stops.is_needed or request.sampling.logprobs)

    @property
    def may_stop(self) -> bool:
        """Whether a stop string may end the request before the engine does."""
        return self._stops.is_needed

    def delta(self, token: int, finish: State | None, logprob: Logprob | None) -> StreamDelta:
        """The delta of a token. A finish reason although `finish` is None means that a stop string
        ended the answer while the engine would go on."""
        request = self.request
        n_output = self._n_output = self._n_output + 1
        if finish is None and self._is_plain:
            return _DELTA((self._detokenizer.push(token), n_output, None, None))
        # A stop token counts as output but has no text.
        text = "" if finish is State.finished_stop else self._detokenizer.push(token)
        chosen = None if logprob is None else self._chosen(text, logprob)
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

    def _chosen(self, text: str, logprob: Logprob) -> Chosen:
        top = logprob.top[: self.request.sampling.top_logprobs]
        texts = [token_text(self._tokenizer, token) for token, _ in top]
        pairs = tuple(zip(texts, (value for _, value in top), strict=True))
        return Chosen(text, self._n_chars, logprob.chosen, pairs)


class StopText:
    """Holds back text that may become a stop string, and removes the stop string that ends the
    answer."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = tuple(stops), ""

    @property
    def is_needed(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be sent now, and whether a stop string is complete."""
        if not self._stops:
            return text, False
        self._held += text
        starts = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            ready, self._held = self._held[: min(starts)], ""
            return ready, True
        n_held = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - n_held
        ready, self._held = self._held[:cut], self._held[cut:]
        return ready, False

    def flush(self) -> str:
        """The text held back, at the end of an answer without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
