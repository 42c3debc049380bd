"""Servers of cells: one at a time, or two that stay up while the cells of a pair take turns."""

import io

import pytest
from rich.console import Console

from loadgen.errors import TargetError
from loadgen.run.run_options import RunOptions
from loadgen.studies.cells.cell import Cell
from loadgen.studies.cells.servers import CellServers
from loadgen.workload.scenario import load_scenario

pytestmark = pytest.mark.e2e


@pytest.fixture
def servers(tmp_path):
    with CellServers(tmp_path / "servers", Console(file=io.StringIO())) as up:
        yield up


def cell(name, engine=""):
    options = RunOptions(engine=engine)
    return Cell(name, load_scenario("quickstart"), "mock", options, server=name)


def is_up(one):
    return one.server.ended() is None


def test_a_server_ends_before_another_begins(servers):
    first = servers.open(cell("a"))
    again = servers.open(cell("a"))
    assert again is first
    assert not again.is_fresh
    other = servers.open(cell("b"))
    assert (is_up(first), is_up(other)) == (False, True)


def test_those_of_a_pair_stay_up_until_they_are_to_start_anew(servers):
    a, b = cell("a"), cell("b")
    first = servers.open(a, beside=b, anew=True)
    assert first.is_fresh
    second = servers.open(b, beside=a)
    assert second.is_fresh, "up all the time, and nobody asked it anything"
    assert servers.open(b, beside=a) is second
    assert servers.open(a, beside=b) is first
    assert is_up(first)
    assert is_up(second)
    assert not first.is_fresh
    anew = servers.open(a, beside=b, anew=True)
    assert anew is not first
    assert (is_up(first), is_up(second), is_up(anew)) == (False, False, True)
    assert servers.open(b, beside=a).is_fresh


def test_another_pair_ends_both(servers):
    up = [
        servers.open(cell("a"), beside=cell("b")),
        servers.open(cell("b"), beside=cell("a")),
    ]
    servers.open(cell("c"))
    assert not any(map(is_up, up))


def test_a_control_that_does_not_start_is_named_and_tried_twice(servers, tmp_path):
    a, control = cell("a"), cell("a.control", engine=f"unix={tmp_path}/nowhere/socket")
    said = []
    for _ in range(3):
        with pytest.raises(TargetError) as caught:
            servers.open(a, beside=control)
        said.append(str(caught.value))
    assert all(text.startswith("a.control: ") for text in said)
    assert ["not tried again after 2 failed starts" in text for text in said] == [
        False, False, True]  # fmt: skip
