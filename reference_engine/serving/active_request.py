"""A request on the engine thread's side: from its tokens to the text that may be shown."""

from __future__ import annotations

from functools import partial

from reference_engine.serving.stops import StopText
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
