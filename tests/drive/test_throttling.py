"""How long the container's quota held us back, under both versions of cgroups."""

import pytest

from loadgen.drive.instrument import _throttled_s, stolen_s, throttled_s

V2 = "usage_usec 10\nnr_periods 4\nnr_throttled 2\nthrottled_usec 1500000\n"
V1 = "nr_periods 4\nnr_throttled 2\nthrottled_time 2500000000\n"


def test_both_versions_of_the_file_are_read_in_their_own_unit():
    assert throttled_s(V2) == pytest.approx(1.5)
    assert throttled_s(V1) == pytest.approx(2.5)
    assert throttled_s("usage_usec 10\n") is None
    assert throttled_s("") is None


@pytest.mark.parametrize(
    ("membership", "folder", "stat", "seconds"),
    [
        ("0::/box\n", "box", V2, 1.5),
        ("9:memory:/m\n4:cpu,cpuacct:/box\n0::/\n", "cpu,cpuacct/box", V1, 2.5),
        ("4:cpuacct,cpu:/box\n", "cpu/box", V1, 2.5),
        ("9:memory:/m\n", "m", V1, None),
        ("0::/\n", "elsewhere", V2, None),
    ],
)
def test_the_file_of_our_own_group_is_found(tmp_path, membership, folder, stat, seconds):
    (tmp_path / "cgroup").write_text(membership)
    root = tmp_path / "root"
    (root / folder).mkdir(parents=True)
    (root / folder / "cpu.stat").write_text(stat)
    found = _throttled_s(tmp_path / "cgroup", root)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_stolen_time_is_a_mean_over_the_processors():
    lines = ["cpu  9 9 9 9 9 9 9 300 0 0", "cpu0 9 9 9 9 9 9 9 100 0 0"]
    stat = "\n".join([*lines, "cpu1 9 9 9 9 9 9 9 200 0 0", "intr 1 2"])
    assert stolen_s(stat, 100) == pytest.approx(1.5)
    assert stolen_s("cpu 1 2 3\n", 100) is None
