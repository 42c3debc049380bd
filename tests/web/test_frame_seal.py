"""The seal on frames between master and workers."""

import pytest

from loadgen.web.frame_seal import (
    DIFFERENT,
    DOWN,
    MARK,
    MISSING,
    UNEXPECTED,
    UP,
    BadFrame,
    Opener,
    Sealer,
)

SECRET = b"a worker secret"


def pair(start=1000):
    return Sealer(SECRET, UP, start), Opener(SECRET, UP)


def refusal(opener, identity, frame):
    with pytest.raises(BadFrame) as error:
        opener.open(identity, frame)
    return str(error.value), error.value.notice


def test_a_frame_is_opened_once_and_its_repetition_refused():
    sealer, opener = pair()
    first, second = sealer.seal(b"w1", b"one"), sealer.seal(b"w1", b"two")
    assert opener.open(b"w1", first) == b"one"
    assert refusal(opener, b"w1", first) == ("a frame was repeated", b"")
    assert opener.open(b"w1", second) == b"two"
    for frame in (first, second):
        assert refusal(opener, b"w1", frame) == ("a frame was repeated", b"")


def test_each_sender_has_its_own_counter_and_continues_after_a_restart():
    sealer, opener = pair(start=1000)
    other = Sealer(SECRET, UP, 10)
    assert opener.open(b"w1", sealer.seal(b"w1", b"one")) == b"one"
    assert opener.open(b"w2", other.seal(b"w2", b"two")) == b"two"
    restarted = Sealer(SECRET, UP, 2000)
    assert opener.open(b"w1", restarted.seal(b"w1", b"three")) == b"three"


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame[:-1] + b"!",  # the message
        lambda frame: frame[:44] + bytes([frame[44] ^ 1]) + frame[45:],  # the counter
        lambda frame: frame[:5] + bytes([frame[5] ^ 1]) + frame[6:],  # the tag
        lambda frame: frame[:40],
    ],
)
def test_a_changed_frame_is_refused(change):
    sealer, opener = pair()
    text, notice = refusal(opener, b"w1", change(sealer.seal(b"w1", b"one")))
    assert "another worker secret" in text
    assert notice == DIFFERENT


def test_a_frame_of_another_worker_or_direction_or_secret_is_refused():
    frame = Sealer(SECRET, UP, 1).seal(b"w1", b"one")
    for opener, identity in (
        (Opener(SECRET, UP), b"w2"),
        (Opener(SECRET, DOWN), b"w1"),
        (Opener(b"other", UP), b"w1"),
    ):
        assert refusal(opener, identity, frame)[1] == DIFFERENT


def test_both_sides_have_a_secret_or_neither():
    frame = Sealer(SECRET, UP, 1).seal(b"w1", b"one")
    assert frame.startswith(MARK)
    assert refusal(Opener(None, UP), b"w1", frame)[1] == UNEXPECTED
    assert refusal(Opener(SECRET, UP), b"w1", b"one")[1] == MISSING
    assert Opener(None, UP).open(b"w1", Sealer(None, UP, 1).seal(b"w1", b"one")) == b"one"
