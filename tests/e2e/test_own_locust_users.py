"""A user's own Locust classes beside a run: `locust -f $(slobench locustfile),own.py`."""

import json
import subprocess
import sys

import pytest

from loadgen.archive.store import read_run
from loadgen.cli.scale import locustfile_path
from loadgen.records import Status

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OWN = """
import json, time
from collections import Counter
from locust import HttpUser, LoadTestShape, User, constant, events, tag, task

most, calls = Counter(), Counter()


@events.init.add_listener
def _(environment, runner, **kwargs):
    def look():
        import gevent
        while True:
            for name, n in runner.user_classes_count.items():
                most[name] = max(most[name], n)
            gevent.sleep(0.05)
    import gevent
    gevent.spawn(look)


@events.quitting.add_listener
def _(environment, **kwargs):
    with open("own.json", "w") as file:
        json.dump([most, calls], file)


class Chat(User):
    wait_time = constant(0.1)
    FIXED

    @tag("fast")
    @task
    def fast(self):
        calls["fast"] += 1

    @tag("slow")
    @task
    def slow(self):
        calls["slow"] += 1
"""
SHAPE = """

class Steps(LoadTestShape):
    def tick(self):
        return None if self.get_run_time() > 2 else (5, 5)
"""
SECOND_SHAPE = SHAPE.replace("Steps", "Other")
HTTP = """

class Page(HttpUser):
    @task
    def home(self):
        self.client.get("/")
"""


def locust(cli, folder, own, *words, files="{ours},own.py"):
    (folder / "own.py").write_text(own)
    lenient = "; ".join(word.removeprefix("--set=") for word in cli.lenient)
    return subprocess.run(
        [
            sys.executable, "-P", "-m", "locust", "-f",
            files.format(ours=locustfile_path()), "--headless",
            "--host=mock", "--engine=ttft=30ms,itl=3ms", "--scenario=quickstart", "--rate=20/s",
            "--duration=5s", "--warmup=0s", "--seed=5", "--slo=ttft<=60s", f"--set={lenient}",
            "--out=run", *words,
        ],
        cwd=folder, env=cli.environ, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("files", ["{ours},own.py", "own.py,{ours}"])
@pytest.mark.parametrize(
    ("own", "words", "n_own"),
    [
        (OWN.replace("FIXED", ""), ("-u", "3", "-r", "10"), 3),
        (OWN.replace("FIXED", "fixed_count = 2"), (), 2),
        (OWN.replace("FIXED", "") + SHAPE, (), 5),
    ],
    ids=["users", "fixed_count", "shape"],
)
def test_own_classes_run_beside_the_schedule(cli, tmp_path, own, words, n_own, files):
    done = locust(cli, tmp_path, own, "--tags", "fast", *words, files=files)
    assert done.returncode == 0, done.stderr
    assert "MET" in done.stdout
    assert "had no tasks left" not in done.stderr
    most, calls = json.loads((tmp_path / "own.json").read_text())
    assert most == {"Chat": n_own, "IdleUser": 1}
    assert set(calls) == {"fast"}
    rows = read_run(tmp_path / "run").request_rows
    assert (rows["status"] == Status.ok).all()
    assert len(rows) == pytest.approx(100, abs=40)  # 4 sigma of Poisson(100)


@pytest.mark.parametrize(
    ("own", "words", "problem"),
    [
        (
            OWN.replace("FIXED", "fixed_count = 4"),
            ("-u", "3"),
            "Chat: their fixed_count is 4 and --users is 3; raise --users",
        ),
        (
            OWN.replace("FIXED", "") + SHAPE + SECOND_SHAPE,
            (),
            "Other and Steps: one LoadTestShape can run beside slobench's; remove one",
        ),
        (
            OWN.replace("FIXED", "") + HTTP,
            (),
            "Page: has no host, and --host mock is no URL; set Page.host",
        ),
        (
            "from locust import LoadTestShape\n" + SHAPE,
            (),
            "Steps: a LoadTestShape without a User class of its own",
        ),
    ],
    ids=["fixed_count", "shapes", "host", "no_class"],
)
def test_what_cannot_run_beside_it_is_one_line_with_the_reason(cli, tmp_path, own, words, problem):
    done = locust(cli, tmp_path, own, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(problem) == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
