"""Output lengths learned online: a fading histogram per kind of request, shrunk to its parents.

    all requests ◀── tenant ◀── (tenant, prompt length, max_tokens), both by power of two

A kind with few answers of its own is mostly its tenant, a new tenant mostly everybody, and an
engine without history assumes that answers run to their `max_tokens`. Given that a request already
generated o tokens, only longer answers count, so predictions sharpen while it decodes.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import numpy as np

from reference_engine.predict.log_bins import N_BINS, UNLIMITED, Shares, Survival, bin_of
from reference_engine.state.predictor import LengthDist, Predictor
from reference_engine.state.sequence import Request, State

_PARENT_ANSWERS = 8.0  # a parent's shares weigh as much as so many answers of one's own
_PRIOR_ANSWERS = 1.0
_MOST_KINDS = 2048  # tenants come from clients; the least recently learned is forgotten
_LARGEST_WEIGHT = 1e100

_ENDED = (State.finished_stop, State.finished_length)
_UNLIMITED_SHARES: Shares = np.eye(1, N_BINS, UNLIMITED)[0]

Key = tuple[str, int, int]  # tenant, bits of the prompt's length, bits of max_tokens
K = TypeVar("K")
V = TypeVar("V")


class _Histogram:
    """Answers per bin, each weighing half as much after `half_life` further ones.

    Instead of fading all bins, a new answer weighs more than the last (`_growth` times).
    """

    __slots__ = ("_growth", "_weight", "bins", "n_observed", "total")

    def __init__(self, half_life: float) -> None:
        self.bins = [0.0] * N_BINS
        self.total = 0.0
        self.n_observed = 0
        self._weight, self._growth = 1.0, 2.0 ** (1.0 / half_life)

    def add(self, i: int) -> None:
        self.bins[i] += self._weight
        self.total += self._weight
        self.n_observed += 1
        self._weight *= self._growth
        if self._weight > _LARGEST_WEIGHT:
            self.bins = [mass / self._weight for mass in self.bins]
            self.total /= self._weight
            self._weight = 1.0

    def shares(self, parent: Shares, parent_answers: float) -> Shares:
        """Own shares, with the parent's as `parent_answers` more answers of today's weight."""
        prior = parent_answers * self._weight
        mixed: Shares = (np.array(self.bins) + prior * parent) / (self.total + prior)
        return mixed


class _Table:
    """A survival function and how much had been observed when it was made."""

    __slots__ = ("due", "due_own", "survival")

    def __init__(self, survival: Survival, n_observed: int, n_own: int) -> None:
        self.survival = survival
        self.due, self.due_own = n_observed + _patience(n_observed), n_own + _patience(n_own)


class QuantilePredictor:
    """`half_life`: answers of a kind after which an old one counts half. About 5 µs per answer and
    3 µs per prediction; a table of predictions is made anew after some 3 % more answers."""

    def __init__(self, half_life: float = 500.0) -> None:
        assert half_life > 0, f"answers must count for a while, not {half_life}"
        self.half_life = half_life
        self._everybody = _Histogram(half_life)
        self._tenants: OrderedDict[str, _Histogram] = OrderedDict()
        self._kinds: OrderedDict[Key, _Histogram] = OrderedDict()
        self._tables: OrderedDict[Key, _Table] = OrderedDict()

    def predict(self, request: Request) -> LengthDist:
        """Tokens still to come, `max_tokens` at most."""
        key = _key(request)
        table, is_new = self._table(key)
        if is_new:
            _keep(self._tables, key, table)
        return table.survival.remaining(request.n_output, request.max_tokens)

    def aside(self) -> Predictor:
        """The same predictions for questions that must leave no trace: a table made for one of
        them is thrown away, so that it changes no later prediction."""
        return _Aside(self)

    def predict_aside(self, request: Request) -> LengthDist:
        """What `predict` would say."""
        table, _ = self._table(_key(request))
        return table.survival.remaining(request.n_output, request.max_tokens)

    def observe(self, request: Request) -> None:
        """Learn from an answer that came to its end. One that was cut off by the client says only
        that it would have been longer, and is not counted."""
        if request.state not in _ENDED:
            return
        is_cut = request.n_output >= request.max_tokens
        i = UNLIMITED if is_cut else bin_of(request.n_output)
        self._everybody.add(i)
        self._known(self._tenants, request.tenant).add(i)
        self._known(self._kinds, _key(request)).add(i)

    def _table(self, key: Key) -> tuple[_Table, bool]:
        """The table of a kind, and whether it had to be made."""
        table, own = self._tables.get(key), self._kinds.get(key)
        n_own = 0 if own is None else own.n_observed
        if table is None or self._everybody.n_observed >= table.due or n_own >= table.due_own:
            return _Table(self._survival(key, own), self._everybody.n_observed, n_own), True
        return table, False

    def _survival(self, key: Key, own: _Histogram | None) -> Survival:
        shares = self._everybody.shares(_UNLIMITED_SHARES, _PRIOR_ANSWERS)
        for histogram in (self._tenants.get(key[0]), own):
            if histogram is not None:
                shares = histogram.shares(shares, _PARENT_ANSWERS)
        return Survival(shares)

    def _known(self, table: OrderedDict[K, _Histogram], key: K) -> _Histogram:
        histogram = table.get(key) or _Histogram(self.half_life)
        _keep(table, key, histogram)
        return histogram


class _Aside:
    def __init__(self, predictor: QuantilePredictor) -> None:
        self._predictor = predictor

    def predict(self, request: Request) -> LengthDist:
        return self._predictor.predict_aside(request)

    def observe(self, request: Request) -> None:
        raise AssertionError("questions are asked, nothing is observed")


def _key(request: Request) -> Key:
    return request.tenant, request.n_prompt.bit_length(), request.max_tokens.bit_length()


def _patience(n_observed: int) -> int:
    """Further answers after which a table is made anew: soon at first, then a small share."""
    return 1 + min(n_observed, 1024) // 32


def _keep(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > _MOST_KINDS:
        table.popitem(last=False)
