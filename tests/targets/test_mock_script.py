"""The mock's script: deadlines, stalls, failures, and the options that set it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.errors import UsageError
from targets.mock_script import OPTIONS, Failure, Script, Stall, apply_options, split_options
from targets.mock_wire import ReplyText


def test_events_have_absolute_deadlines():
    script = Script(ttft_s=0.05, itl_s=0.01)
    assert [script.due_s(j) for j in (0, 1, 63)] == pytest.approx([0.05, 0.06, 0.68])
    assert Script(ttft_s=0.05, itl_s=0.01, coalesce=4).due_s(2) == pytest.approx(0.13)


def test_a_stall_holds_back_what_falls_due_in_it_and_shifts_nothing_else():
    script = Script(stalls=(Stall(5.0, 1.4),))
    assert script.after_stalls_s(4.99) == 4.99
    assert script.after_stalls_s(5.0) == 6.4
    assert script.after_stalls_s(6.39) == 6.4
    assert script.after_stalls_s(6.4) == 6.4
    assert script.after_stalls_s(6.41) == 6.41


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5)), max_size=4),
    st.lists(st.floats(0, 60), min_size=2, max_size=2),
)
def test_stalls_keep_order_and_never_make_anything_early(stalls, instants):
    script = Script(stalls=tuple(Stall(*s) for s in stalls))
    a, b = sorted(instants)
    assert script.after_stalls_s(a) >= a
    assert script.after_stalls_s(a) <= script.after_stalls_s(b)


def test_failures_depend_only_on_the_seed_and_the_number():
    script = Script(failures=(Failure("500", 0.1), Failure("cut", 0.05)))
    forward = [script.failure(n) for n in range(20_000)]
    backward = [script.failure(n) for n in reversed(range(20_000))]
    assert forward == backward[::-1]
    # Binomial with n = 20000: 4 standard deviations are 170 and 123 requests.
    assert abs(forward.count("500") - 2000) < 170
    assert abs(forward.count("cut") - 1000) < 123
    other = Script(failures=script.failures, seed=1)
    assert [other.failure(n) for n in range(200)] != forward[:200]


def test_a_failure_without_a_share_is_every_request():
    script = apply_options(Script(), split_options("fail=hang"))
    assert {script.failure(n) for n in range(100)} == {"hang"}


def test_a_reply_stops_early_only_where_end_of_sequence_counts():
    script = Script(tokens=64, eos_after=4)
    assert script.output_tokens(16, ignore_eos=True) == (16, "length")
    assert script.output_tokens(16, ignore_eos=False) == (4, "stop")
    assert script.output_tokens(3, ignore_eos=False) == (3, "length")
    assert script.output_tokens(None, ignore_eos=True) == (64, "length")


def test_prompt_tokens_are_linear_in_characters():
    script = Script(chars_per_token=4.0, overhead_tokens=8)
    assert script.prompt_tokens("x" * 400, is_chat=True) == 108
    assert script.prompt_tokens("x" * 400, is_chat=False) == 100


def test_options_are_read_with_their_units_and_repeatable_ones_add_up():
    text = "ttft=80ms, itl=5ms,stall=1.4s@5s,stall=1s@9s,fail=500:10%,fail=cut:0.02,role=early"
    script = apply_options(Script(), split_options(text))
    assert (script.ttft_s, script.itl_s, script.role) == (0.08, 0.005, "early")
    assert script.stalls == (Stall(5.0, 1.4), Stall(9.0, 1.0))
    assert script.failures == (Failure("500", 0.1), Failure("cut", 0.02))
    assert apply_options(Script(), [("speed", "200/s")]).itl_s == 0.005


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("ttfs", "1s", "unknown mock option 'ttfs'; did you mean 'ttft'?"),
        ("ttft", "5", "mock option ttft '5': '5' is not a duration"),
        ("stall", "1s", "expected LENGTH@START"),
        ("fail", "cutt", "no such failure; did you mean 'cut'?"),
        ("fail", "200", "no such failure"),
        ("fail", "cut:200%", "not a share"),
        ("role", "late", "known: early, first, off"),
        ("tokens", "0", "expected an integer, 1 or more"),
        ("tokens", "x", "expected an integer, 1 or more"),
        ("chars_per_token", "nan", "expected a positive number"),
        ("reject", "ignore-eos", "did you mean 'ignore_eos'?"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_expected_form(key, value, problem):
    with pytest.raises(UsageError) as caught:
        apply_options(Script(), [(key, value)])
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shares_above_100_percent_are_rejected():
    with pytest.raises(UsageError, match="add up to 120%"):
        apply_options(Script(), [("fail", "cut:60%"), ("fail", "500:60%")])


def test_every_option_sets_a_field_of_the_script():
    assert {field for field, _, _ in OPTIONS.values()} == set(Script.__dataclass_fields__)


@given(st.integers(1, 40), st.integers(1, 9), st.booleans(), st.integers(0, 5))
def test_the_events_of_a_reply_carry_all_its_tokens_and_valid_json(tokens, coalesce, chat, think):
    script = Script(coalesce=coalesce, reasoning=think)
    reply = ReplyText(script, 3, 0, chat, 'a"b', 10, tokens, "length", True, True)
    assert sum(reply.tokens_in(j) for j in range(reply.n_events)) == tokens
    events = [json.loads(reply.event(j).removeprefix(b"data: ")) for j in range(reply.n_events)]
    assert [e["usage"]["completion_tokens"] for e in events][-1] == tokens
    assert all(event["model"] == 'a"b' for event in events)
    last, end, done = reply.tail().decode().split("\n\n")[:3]
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    assert json.loads(end[6:])["usage"]["total_tokens"] == 10 + tokens
    assert done == "data: [DONE]"
