"""Options rejected before Locust starts, and the variables of its workers on this machine."""

import os
import socket
from argparse import Namespace
from typing import Any

import pytest
from typer.testing import CliRunner

from loadgen.cli.app import app
from loadgen.cli.flags import ScenarioFlags, TrafficFlags
from loadgen.cli.parse import choose_scenario
from loadgen.cli.scale import (
    PASSWORD,
    PLUGINS,
    TARGET,
    ProcessFlags,
    check_ports,
    password,
    traffic_options,
)
from loadgen.errors import UsageError
from loadgen.web.form import FROM_FLAGS, IN_FORM, RunForm, Settings, scenarios, worker_environ


@pytest.mark.parametrize("environ", [{}, {PASSWORD: ""}])
def test_a_login_without_a_password_is_refused(environ):
    with pytest.raises(UsageError, match=f"{PASSWORD} is not set or is empty"):
        password(environ)


def test_the_password_is_the_variables():
    assert password({PASSWORD: "open sesame"}) == "open sesame"


@pytest.fixture
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_that_is_taken_is_named(taken_port):
    with pytest.raises(UsageError, match=f"--web-port {taken_port}.*another process listens"):
        check_ports(ProcessFlags(web_port=taken_port))
    with pytest.raises(UsageError, match=f"--master-port {taken_port}.*another process listens"):
        check_ports(ProcessFlags(headless=True, expect_workers=2, master_port=taken_port))


def test_ports_that_are_not_used_may_be_taken(taken_port):
    check_ports(ProcessFlags(headless=True, web_port=taken_port, master_port=taken_port))


def test_a_host_that_is_none_of_this_machine_is_named():
    with pytest.raises(UsageError, match=r"--master-port 5557: cannot listen at 192\.0\.2\.1:5557"):
        check_ports(ProcessFlags(headless=True, expect_workers=1, master_host="192.0.2.1"))


def options(**given):
    return Namespace(**{"host": None, "plugins": "", **given})


def test_workers_find_the_plugins_and_the_target_file_of_their_own_command_line(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target.yaml").write_text("url: http://localhost:8000\n")
    found = worker_environ(options(host="target.yaml", plugins="a.py; sub/b.py"), {})
    assert found == {
        TARGET: str(tmp_path / "target.yaml"),
        PLUGINS: os.pathsep.join([str(tmp_path / "a.py"), str(tmp_path / "sub" / "b.py")]),
    }


def test_variables_that_are_set_stay(tmp_path):
    file = tmp_path / "target.yaml"
    file.write_text("url: http://localhost:8000\n")
    given = {TARGET: "/etc/other.yaml", PLUGINS: ""}
    assert worker_environ(options(host=str(file)), given) == {}


@pytest.mark.parametrize("host", [None, "", "mock", "http://localhost:8000", "nothing.yaml"])
def test_a_target_that_is_no_file_sets_no_variable(host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mock").write_text("no target file\n")
    assert worker_environ(options(host=host), {}) == {}


@pytest.mark.parametrize(("target", "engine"), [("mock", "ttft=30ms"), ("http://localhost:1", "")])
def test_engine_settings_are_for_bundled_servers_only(target, engine):
    words = dict.fromkeys((*IN_FORM, "settings", "traffic", "out", "max_skew"), "")
    start = options(
        **words | {"scenario": "quickstart"},
        host=target, engine="ttft=30ms", force=False, on_worker_loss="continue",
    )  # fmt: skip
    assert Settings(start).next_run(start).engine == engine


@pytest.mark.faults
@pytest.mark.parametrize(
    "target",
    ["http+unix://%2Frun%2Fa.sock", "unix:///run/a.sock", "unix:/run/a.sock", "file:///etc/passwd",
     "ftp://h", "target.yaml"],
)  # fmt: skip
def test_the_form_names_no_socket_and_no_file_unless_the_command_line_does(target):
    words = dict.fromkeys((*IN_FORM, "settings", "traffic", "out", "max_skew"), "")
    words |= {"scenario": "quickstart"}
    common = {"engine": "", "force": False, "on_worker_loss": "continue"}
    settings = Settings(options(**words, **common, host="http://localhost:8000"))
    with pytest.raises(UsageError, match="enter an http:// or https:// URL, reference or mock"):
        settings.next_run(options(**words, **common, host=target))
    named = options(**words, **common, host=target)
    assert Settings(named).next_run(named).target == target


def test_the_traffic_flags_of_the_command_line_reach_the_run():
    flags = TrafficFlags(concurrency=3, input_len=16, output_len=4, duration="2", warmup="1")
    words: dict[str, Any] = traffic_options(flags)
    assert (words["duration"], words["warmup"]) == ("2", "1")
    form = RunForm(FROM_FLAGS, "mock", **words)
    alone = choose_scenario(ScenarioFlags(), flags)
    assert form.chosen_scenario() == alone
    on_top = RunForm("quickstart", "mock", **words).chosen_scenario()
    assert on_top.arrivals == alone.arrivals
    assert on_top.slo != ()


def test_a_traffic_without_a_scenario_is_the_first_choice_of_the_form():
    assert scenarios(["web", "--traffic", "{}"], {})[0] == FROM_FLAGS
    assert FROM_FLAGS not in scenarios(["web", "--traffic", "{}", "--scenario", "quickstart"], {})


@pytest.mark.parametrize("traffic", ["{", "[]", '{"rates": 3}'])
def test_a_traffic_that_is_no_object_of_flags_is_refused(traffic):
    with pytest.raises(UsageError, match="--traffic"):
        RunForm(FROM_FLAGS, "mock", traffic=traffic).chosen_scenario()


def test_web_names_a_mistake_in_the_traffic_before_locust_starts():
    words = ["--scenario", "quickstart", "--target", "mock", "--rate", "2", "--users", "3"]
    result = CliRunner().invoke(app, ["web", *words])
    assert "use one: --rate" in str(result.exception)
