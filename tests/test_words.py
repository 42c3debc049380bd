"""The words every part shares: registry, clock, errors, records."""

import hashlib
from typing import Annotated, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loadgen import errors
from loadgen.errors import MissingDependency, SlobenchError, UnknownKind, UsageError, nearest
from loadgen.records import (
    CHUNKS,
    EDGES,
    OPTIONAL,
    REQUESTS,
    SCHEDULE,
    Names,
    Phase,
    Run,
    Status,
    empty_requests,
    schedule_sha256,
)
from loadgen.registry import Block, Plugin, Registry
from loadgen.system.clock import MonotonicClock, VirtualClock
from tests.runs import MANIFEST


class Shape(Plugin):
    pass


class Circle(Shape):
    kind: ClassVar[str] = "circle"
    radius: float = 1.0


class Square(Shape):
    kind: ClassVar[str] = "square"
    side: float


def shapes():
    registry: Registry[Shape] = Registry(
        "slobench.test_shapes",
        "shape",
        lambda spec: {"kind": "square", "side": spec} if isinstance(spec, float) else None,
    )
    registry.register(Circle)
    registry.register(Square)
    return registry


SHAPES = shapes()


class Drawing(Block):
    title: str
    shape: Annotated[Shape, SHAPES]


def test_a_kind_is_built_from_its_keys():
    assert SHAPES.build({"kind": "circle", "radius": 2.0}) == Circle(radius=2.0)
    assert SHAPES.build(3.0) == Square(side=3.0)
    assert SHAPES.build(Circle()) == Circle()


def test_kinds_are_known_by_name_and_found_by_iteration():
    assert SHAPES.names() == ["circle", "square"]
    assert [cls.__name__ for cls in SHAPES] == ["Circle", "Square"]


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UnknownKind) as caught:
        SHAPES.build({"kind": "sqare", "side": 1.0})
    assert str(caught.value) == (
        "unknown shape 'sqare'; did you mean 'square'? (known: circle, square)"
    )


@pytest.mark.parametrize("spec", [None, "circle", {"radius": 1.0}, {"kind": 3}, []])
def test_a_value_that_names_no_kind_is_refused(spec):
    with pytest.raises(ValueError, match=r"expected \{kind: …\} naming the shape"):
        SHAPES.build(spec)


def test_our_kinds_are_found_through_entry_points():
    arrivals: Registry[Plugin] = Registry("slobench.arrivals", "arrival process")
    assert {"constant", "poisson", "gamma"} <= set(arrivals.names())
    assert arrivals.get("gamma").kind == "gamma"


def test_every_declared_kind_loads_under_its_own_name():
    for group in ("slobench.arrivals", "slobench.lengths"):
        registry: Registry[Plugin] = Registry(group, "kind")
        assert [cls.kind for cls in registry] == registry.names()


def test_a_later_registration_wins():
    class RoundCircle(Shape):
        kind: ClassVar[str] = "circle"

    registry = shapes()
    registry.register(RoundCircle)
    assert registry.get("circle") is RoundCircle


def test_plugins_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Circle().radius = 3.0


@pytest.mark.parametrize(
    ("values", "loc", "said"),
    [
        ({"title": "x", "shape": {"kind": "circel"}}, ("shape", "kind"), "did you mean 'circle'?"),
        (
            {"title": "x", "shape": {"kind": "circle", "radus": 1.0}},
            ("shape", "radus"),
            "unknown key 'radus'; did you mean 'radius'? (known: radius)",
        ),
        ({"title": "x", "shape": {"kind": "square"}}, ("shape", "side"), "Field required"),
        ({"titel": "x", "shape": 1.0}, ("titel",), "did you mean 'title'? (known: shape, title)"),
    ],
)
def test_a_mistake_inside_a_field_has_its_whole_path_and_is_told_once(values, loc, said):
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate(values)
    (detail,) = caught.value.errors()
    assert detail["loc"] == loc
    assert said in detail["msg"]


def test_a_field_of_kinds_is_written_back_with_its_kind_first():
    drawing = Drawing.model_validate({"title": "x", "shape": {"kind": "circle", "radius": 2.0}})
    assert list(drawing.model_dump()["shape"].items()) == [("kind", "circle"), ("radius", 2.0)]
    plain = Drawing(title="x", shape=Circle())
    assert plain.model_dump(exclude_defaults=True)["shape"] == {"kind": "circle"}
    assert Drawing.model_validate(drawing.model_dump()) == drawing


@given(st.lists(st.text(min_size=1), max_size=5, unique=True), st.text())
def test_nearest_lists_every_choice(choices, word):
    phrase = nearest(word, choices)
    names = f"known: {', '.join(sorted(choices)) or 'none'}"
    assert phrase == names or phrase.endswith(f"'? ({names})")


def test_nearest_suggests_only_what_is_near():
    assert nearest("poison", ["poisson", "gamma"]) == (
        "did you mean 'poisson'? (known: gamma, poisson)"
    )
    assert nearest("zzz", ["poisson"]) == "known: poisson"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("prompt_tokens", "did you mean 'input_tokens'?"),
        ("completion_tokens", "did you mean 'output_tokens'?"),
        ("prompts", "did you mean 'prompts_file'?"),
    ],
)
def test_nearest_takes_the_words_of_the_openai_api(word, hint):
    known = ["input_tokens", "output_tokens", "prompts_file", "kind"]
    assert nearest(word, known).startswith(hint)


def test_every_error_has_the_exit_code_of_the_tree_in_the_docstring():
    codes = {
        name: value.exit_code
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, SlobenchError)
    }
    assert codes == {
        "SlobenchError": 4,
        "UsageError": 2,
        "ScenarioError": 2,
        "TargetFileError": 2,
        "TraceFileError": 2,
        "UnknownKind": 2,
        "TargetError": 3,
        "RunInvalid": 3,
        "MissingDependency": 2,
    }
    assert all(name in (errors.__doc__ or "") for name in codes)


def test_a_missing_package_is_not_the_users_mistake():
    assert not issubclass(MissingDependency, UsageError)


def test_the_virtual_clock_moves_only_when_told():
    clock = VirtualClock(5.0)
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(1.5)
    clock.advance_to(10.0)
    assert clock.now_s() == 10.0


@pytest.mark.parametrize("instant_s", [9.9, -1.0])
def test_the_virtual_clock_never_goes_back(instant_s):
    with pytest.raises(AssertionError, match="cannot be advanced"):
        VirtualClock(10.0).advance_to(instant_s)


def test_two_monotonic_clocks_of_one_epoch_agree():
    first = MonotonicClock()
    second = MonotonicClock(first.epoch_ns)
    before, between, after = first.now_s(), second.now_s(), first.now_s()
    assert 0 <= before <= between <= after


def test_the_tables_have_no_padding_that_could_hide_garbage():
    for table in (SCHEDULE, EDGES, REQUESTS, CHUNKS):
        fields = [table[name] for name in table.names or ()]
        assert table.itemsize == sum(field.itemsize for field in fields)
        assert all(field.byteorder in "=|<" for field in fields)


def test_edges_without_delays_keep_the_fingerprint_of_older_plans():
    schedule = np.zeros(2, SCHEDULE)
    edges = np.array([(1, 0, 0.0)], EDGES)
    older = np.array([(1, 0)], [("request_id", "u4"), ("after", "u4")])
    columns = [n for n in SCHEDULE.names or () if n not in OPTIONAL]
    rows = schedule[columns].astype([(name, SCHEDULE[name]) for name in columns])
    assert (
        schedule_sha256(schedule, edges)
        == hashlib.sha256(rows.tobytes() + older.tobytes()).hexdigest()
    )
    first, second = (np.array([(1, 0, delay_s)], EDGES) for delay_s in (1.0, 2.0))
    assert schedule_sha256(schedule, first) != schedule_sha256(schedule, second)


def test_an_empty_record_says_that_nothing_happened():
    schedule = np.zeros(3, SCHEDULE)
    schedule["request_id"] = [4, 5, 6]
    rows = empty_requests(schedule)
    assert rows["request_id"].tolist() == [4, 5, 6]
    assert set(rows["status"]) == {Status.not_released}
    assert np.isnan(rows["released_s"]).all()
    assert np.isnan(rows["server_ttft_s"]).all()
    assert not rows["output_tokens"].any()


def test_a_run_shows_its_words_as_categories():
    schedule = np.zeros(2, SCHEDULE)
    schedule["request_id"], schedule["class_id"] = [0, 1], [0, 1]
    schedule["phase"] = Phase.measure
    rows = empty_requests(schedule)
    rows["status"][0], rows["error_id"][1] = Status.ok, 1
    names = Names(classes=("chat", "rag"), errors=("", "refused"))
    run = Run(MANIFEST, schedule, rows, np.empty(0, CHUNKS), names=names)
    assert run.schedule["class"].tolist() == ["chat", "rag"]
    assert run.requests["status"].tolist() == ["ok", "not_released"]
    assert run.requests["error"].tolist() == ["", "refused"]
    assert list(run.chunks.columns) == ["request_id", "received_s", "tokens"]
