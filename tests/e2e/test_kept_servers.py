"""Servers of cells: one at a time, or two that stay up while the cells of a pair take turns."""

import io
import json

import pytest
from rich.console import Console

from loadgen.cell import Cell
from loadgen.cell_server import CellServers
from loadgen.errors import TargetError
from loadgen.run_options import RunOptions
from loadgen.workload.scenario import load_scenario

pytestmark = pytest.mark.e2e
FEW = """\
# A few requests, equally far apart, whatever else the machine is doing.
schema: 1
name: few
seed: 7
arrivals: {kind: constant, rate: 10/s}
requests: {input_tokens: 16, output_tokens: 4}
phases: {warmup: 0s, measure: 1s, drain: 20s}
instrument: {lateness: 60s, loop_lag: 60s, read_backlog: 60s, cpu: 100%, run_delay: 100%}
"""


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


def test_those_of_a_pair_stay_up_for_two_pairs_and_start_anew_together(servers):
    a, b = cell("a"), cell("b")
    first = servers.open(a, beside=b)
    assert first.is_fresh
    second = servers.open(b, beside=a, is_second=True)
    assert second.is_fresh, "up all the time, and nobody asked it anything"
    assert servers.open(b, beside=a) is second
    assert servers.open(a, beside=b, is_second=True) is first
    assert is_up(first)
    assert is_up(second)
    assert not first.is_fresh
    anew = servers.open(a, beside=b)
    assert anew is not first
    assert (is_up(first), is_up(second), is_up(anew)) == (False, False, True)
    assert servers.open(b, beside=a, is_second=True) is not second


def test_a_pair_is_not_parted_although_its_control_served_another(servers):
    a, b, control = cell("a"), cell("b"), cell("control")
    servers.open(b, beside=control)  # a night that goes on: the first pair was there already
    servers.open(control, beside=b, is_second=True)
    servers.open(control, beside=b)
    used = servers.open(b, beside=control, is_second=True)
    first = servers.open(a, beside=control)
    assert not is_up(used)
    second = servers.open(control, beside=a, is_second=True)
    assert second.is_fresh
    assert is_up(first), "its server is started once for its run"


def test_another_pair_ends_both(servers):
    up = [
        servers.open(cell("a"), beside=cell("b")),
        servers.open(cell("b"), beside=cell("a"), is_second=True),
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


NIGHT = """\
schema: 1
targets: [mock]
scenarios: [few.yaml]
control: mock
repeats: 3
metrics: [p50(tpot)]
"""


def test_a_night_of_pairs_starts_both_servers_for_every_second_pair(cli, tmp_path):
    (tmp_path / "few.yaml").write_text(FEW)
    (tmp_path / "nightly.yaml").write_text(NIGHT)
    done = cli("nightly", "nightly.yaml", "--out", "first", cwd=tmp_path, timeout_s=120)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "first" / "nightly.json").read_text())
    assert len(facts["cells"][0]["runs"]) == 3
    assert facts["cells"][0]["control"]["servers"] == "together"
    logs = sorted(path.name for path in (tmp_path / "first" / "servers").iterdir())
    assert logs == [
        "mock_few_mock", "mock_few_mock-1", "mock_few_mock.control", "mock_few_mock.control-1"
    ]  # fmt: skip
