"""What Locust's workers find on this machine."""

import os
from argparse import Namespace

import pytest

from loadgen.command.web import PLUGINS, TARGET
from loadgen.web.options import of_this_machine


def options(**given):
    return Namespace(**{"host": None, "plugins": "", **given})


def test_workers_find_the_plugins_and_the_target_file_of_their_own_command_line(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target.yaml").write_text("url: http://localhost:8000\n")
    found = of_this_machine(options(host="target.yaml", plugins="a.py; sub/b.py"), {})
    assert found == {
        TARGET: str(tmp_path / "target.yaml"),
        PLUGINS: os.pathsep.join([str(tmp_path / "a.py"), str(tmp_path / "sub" / "b.py")]),
    }


def test_what_a_worker_was_given_stays(tmp_path):
    file = tmp_path / "target.yaml"
    file.write_text("url: http://localhost:8000\n")
    given = {TARGET: "/etc/other.yaml", PLUGINS: ""}
    assert of_this_machine(options(host=str(file)), given) == {}


@pytest.mark.parametrize("host", [None, "", "mock", "http://localhost:8000", "nothing.yaml"])
def test_a_target_that_is_no_file_is_none(host, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mock").write_text("no target file\n")
    assert of_this_machine(options(host=host), {}) == {}
