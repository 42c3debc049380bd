"""The idle connections against a plain list of them."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.pool import Pool


@dataclass(eq=False)
class Line:
    remote: str
    key: int


steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "take", "discard"]), st.integers(0, 2), st.sampled_from("abc")
    ),
    max_size=60,
)


@given(steps)
def test_whoever_waits_is_taken_once_and_by_its_own_key(steps):
    pool: Pool[Line] = Pool()
    waiting: list[Line] = []
    for what, key, remote in steps:
        if what == "put":
            waiting.append(Line(remote, key))
            pool.put(waiting[-1])
        elif what == "take":
            taken = pool.take(key)
            mine = [line for line in waiting if line.key == key]
            assert (taken is None) == (not mine)
            if taken is not None:
                same = [line for line in mine if line.remote == taken.remote]
                assert taken is same[-1]  # of one address, the one used last
                waiting.remove(taken)
        elif waiting:
            pool.discard(waiting.pop(0))
        assert sorted(map(id, pool.all())) == sorted(map(id, waiting))
    pool.discard(Line("a", 0))


def test_addresses_take_turns():
    pool: Pool[Line] = Pool()
    for remote in ("a", "a", "b", "c"):
        pool.put(Line(remote, 0))
    seen = []
    for _ in range(6):
        line = pool.take(0)
        assert line is not None
        seen.append(line.remote)
        pool.put(line)
    assert seen == ["a", "b", "c"] * 2
