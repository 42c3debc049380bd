"""`async_depth` 1: the next step is planned before it is known what this one's tokens end."""

from __future__ import annotations

from reference_engine.state.plan import How
from reference_engine.state.sequence import State
from tests.reference_engine.engine_kit import Rig, request, rig, toy_output


def ahead(**options) -> Rig:
    return rig(async_depth=1, executor_args={"step_s": 1.0, "eos_every": 0}, **options)


def sizes(engine: Rig) -> list[tuple[int, int, int]]:
    return [(r.n_prefill_tokens, r.n_decode, r.padding_tokens) for r in engine.state.log.steps]


def test_an_answer_that_stops_costs_one_wasted_row():
    engine = ahead()
    engine.admit(a := request("a", [1, 2], 9, oracle_output_tokens=3), request("b", [3, 4], 6))
    engine.drain()
    assert (a.n_output, a.state, a.finished_s) == (3, State.finished_stop, 3.0)
    # a's fourth token was already planned when its third said that it was the last.
    assert sizes(engine) == [(4, 0, 0), (0, 2, 0), (0, 2, 0), (0, 1, 1), (0, 1, 0), (0, 1, 0)]
    assert engine.state.counters.padding_tokens == 1
    assert engine.state.log.steps[3].context_tokens == 4


def test_an_answer_that_gets_as_long_as_it_may_wastes_nothing():
    engine = ahead()
    engine.admit(a := request("a", [1, 2], 3), request("b", [3, 4], 5))
    engine.drain()
    assert a.output == toy_output([1, 2], 3)
    assert sizes(engine) == [(4, 0, 0), (0, 2, 0), (0, 2, 0), (0, 1, 0), (0, 1, 0)]


def test_an_arrival_waits_for_one_more_step():
    def first_token_s(depth: int) -> float | None:
        engine = rig(async_depth=depth, executor_args={"step_s": 1.0})
        engine.admit(request("a", [1, 2], 9))
        engine.step()
        engine.admit(late := request("late", [5], 2, arrived_s=1.0))
        engine.drain()
        return late.first_token_s

    assert (first_token_s(0), first_token_s(1)) == (2.0, 3.0)


def test_a_slot_is_filled_a_step_after_it_becomes_free():
    engine = ahead(max_num_seqs=1)
    engine.admit(request("a", [1], 2), b := request("b", [2], 1))
    engine.drain()
    # Planned at 1 s, when a's last token was being computed and its slot still taken; then at 2 s.
    assert (b.scheduled_s, b.finished_s) == (2.0, 3.0)
    entry = engine.state.explain("b")
    assert entry is not None
    assert entry.sentence() == "waited 2 s: 2 s for sequence slots"


def test_a_cancel_between_steps_turns_its_planned_rows_into_padding():
    engine = ahead(token_budget=16)
    engine.admit(request("a", [1], 9), request("b", range(60), 9))
    engine.step()
    engine.state.end("b", State.finished_abort)
    engine.step()
    assert sizes(engine)[1] == (0, 1, 15)
    engine.drain()


class Late:
    """The toy's steps, whose tokens are told only when they are waited for."""

    def __init__(self, engine: Rig) -> None:
        self._inner, self._state = engine.executor, engine.state
        self.caps = self._inner.caps
        self.planned: list[bool] = []

    def execute(self, batch):
        return self.launch(batch)()

    def launch(self, batch):
        result = self._inner.execute(batch)

        def wait():
            self.planned.append(self._state.ahead is not None)
            return result

        return wait


def test_a_step_that_is_under_way_while_the_next_is_planned_decides_as_one_that_is_done():
    """Answers stop by themselves, run out of memory and are swapped; both ways leave the same
    records, events and tokens."""

    def told(is_late: bool):
        engine = rig(
            async_depth=1, n_blocks=14, max_model_len=160, token_budget=24, n_host_blocks=20,
            how=How.swap, executor_args={"step_s": 1.0, "eos_every": 60},
        )  # fmt: skip
        if is_late:
            engine.executor = Late(engine)
        requests = [
            request(f"r{i}", range(i, i + 9 + 7 * i), 40, stop_ids=[0], min_tokens=3 * (i % 2))
            for i in range(8)
        ]
        for req in requests:
            engine.admit(req)
            engine.step()
        engine.drain()
        steps = [record._replace(plan_s=0.0) for record in engine.state.log.steps]
        events = [(e.t_s, e.kind, e.request_id) for e in engine.state.log.events]
        assert engine.state.counters.swaps > 0
        states = {req.state for req in requests}
        return engine, steps, events, [req.output for req in requests], states

    _, *plain = told(is_late=False)
    engine, *late = told(is_late=True)
    assert late == plain
    assert len(plain[-1]) == 2  # some stopped, some got as long as they may
    assert sum(engine.executor.planned) > 20  # planned before their tokens were known
