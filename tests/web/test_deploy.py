"""The files under deploy/ as far as they can be checked without a cluster: they parse, hang
together, and give the command line flags that it has."""

import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from loadgen.cli import parse
from loadgen.cli.app import app
from loadgen.cli.flags import ScenarioFlags, TrafficFlags
from loadgen.cli.scale import locustfile_path, ramp_up
from loadgen.errors import UsageError
from loadgen.web.form import add_options
from loadgen.workload.arrivals import Users

DEPLOY = Path(__file__).parents[2] / "deploy"
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
JOBS = [one for one in OBJECTS if one["kind"] == "Job"]


def container(job):
    (only,) = job["spec"]["template"]["spec"]["containers"]
    return only


def test_the_service_leads_to_the_master():
    (service,) = [one for one in OBJECTS if one["kind"] == "Service"]
    master, worker = JOBS
    labels = master["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["port"] == container(master)["ports"][0]["containerPort"]
    assert f"--master={service['metadata']['name']}" in container(worker)["args"]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job["metadata"]["name"])
def test_a_job_gives_flags_that_the_command_line_has(job):
    verb, *words = container(job)["args"]
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]  # a group
    parsed = command.make_context(verb, list(words)).params
    assert parsed["headless" if verb == "web" else "master"]
    assert job["spec"]["backoffLimit"] == 0


def test_web_and_worker_take_the_names_that_locust_gives_its_flags():
    commands = get_command(app).commands  # type: ignore[attr-defined]  # a group
    words = ["--host", "http://h", "--run-time", "30s", "--processes", "2", "-P", "8123",
             "--master-bind-host", "10.0.0.1", "--master-bind-port", "6001"]  # fmt: skip
    found = commands["web"].make_context("web", words).params
    expected = {"target": "http://h", "duration": "30s", "workers": 2, "web_port": 8123,
                "master_host": "10.0.0.1", "master_port": 6001}  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    words = ["--master-host", "10.0.0.1", "--master-port", "6001"]
    found = commands["worker"].make_context("worker", words).params
    assert (found["master"], found["port"]) == ("10.0.0.1", 6001)


def test_users_join_at_the_spawn_rate_of_locust():
    words = ["-u", "3", "-r", "0.9", "-t", "30s"]
    commands = get_command(app).commands  # type: ignore[attr-defined]  # a group
    found = commands["web"].make_context("web", words).params
    (assignment,) = ramp_up(found["spawn_rate"], found["users"])
    scenario = parse.choose_scenario(
        ScenarioFlags(set_=[assignment]),
        TrafficFlags(users=3, input_len=9, output_len=3, duration="30s"),
    )
    assert isinstance(scenario.arrivals, Users)
    assert scenario.arrivals.ramp_up == pytest.approx(10 / 3)
    assert ramp_up(None, None) == []
    with pytest.raises(UsageError, match="needs --users"):
        ramp_up(2.0, None)
    with pytest.raises(UsageError, match="above 0"):
        ramp_up(0.0, 3)


def test_as_many_workers_are_started_as_are_waited_for():
    master, worker = JOBS
    (expected,) = re.findall(r"--expect-workers=(\d+)", " ".join(container(master)["args"]))
    assert int(expected) == worker["spec"]["parallelism"] == worker["spec"]["completions"]


def test_the_operator_is_told_options_of_ours_and_of_locust():
    (test,) = yaml.safe_load_all((DEPLOY / "locust-operator.yaml").read_text())
    assert (test["apiVersion"], test["kind"]) == ("locust.io/v2", "LocustTest")
    seen = set[str]()

    class Parser:
        def add_argument(self, flag, **_):
            seen.add(flag)

    add_options(Parser())
    given = set(re.findall(r"--[a-z-]+", test["spec"]["master"]["command"]))
    assert given <= seen | {"--locustfile", "--host"}
    path = locustfile_path()
    for role in ("master", "worker"):
        assert f"/{path.parents[1].name}/web/{path.name}" in test["spec"][role]["command"]


def test_the_image_runs_our_command_line_as_nobody_special():
    text = (DEPLOY / "Containerfile").read_text()
    assert 'ENTRYPOINT ["slobench"]' in text
    assert re.search(r"^USER [1-9]", text, re.MULTILINE)
    assert "[web]" in text


def test_the_image_gets_nothing_that_is_not_versioned():
    """Runs, caches and environments are large, and a run may hold confidential data."""
    root = DEPLOY.parent
    kept_out = {
        name
        for line in (root / ".dockerignore").read_text().splitlines()
        if (name := line.removeprefix("**/").rstrip("/"))
    }
    unversioned = (root / ".gitignore").read_text().splitlines()
    assert {name.rstrip("/") for name in unversioned} | {".git"} <= kept_out
