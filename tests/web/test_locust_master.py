"""Locust's process without a run: starts that are refused, and early ends."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(120)

EARLY = """
import sys
from loadgen.web.form import RunForm
from loadgen.web.locust_master import Master

master = Master(lambda worker, data: None, lambda: ["w"], lambda text: None)
master.begin(RunForm("quickstart", "mock"))
assert "a run is on" in master.why_not
master.stop(is_interrupt=sys.argv[1] == "interrupt")  # the conductor is no interpreter yet
assert master.wait_until(lambda: master.finished is not None, 100)
assert master.why_not is None
print(master.finished.exit_code, master.finished.error)
"""

LOCUST = """
import loadgen.web.locust_events as wiring
import gevent
from locust import events
from locust.argument_parser import get_parser
from locust.env import Environment


def master_of(*words, has_page=False, has_login=False):
    wiring.listen()
    options = get_parser().parse_args(["--master", "--master-bind-host=127.0.0.1", *words])
    environment = Environment(
        user_classes=[wiring.IdleUser], shape_class=wiring.OpenLoop(), events=events,
        parsed_options=options,
    )
    runner = environment.create_master_runner("127.0.0.1", 0)
    page = None
    if has_page:
        page = environment.create_web_ui("127.0.0.1", 0, delayed_start=True, web_login=has_login)
    events.init.fire(environment=environment, runner=runner, web_ui=page)
    return runner, page
"""

NOBODY_THERE = """
runner, page = master_of(has_page=True)
master = wiring.OpenLoop.session.master
print(page.app.test_client().post("/swarm", data={"scenario": "quickstart"}).get_json())
for _ in range(2):
    runner.start_shape()
    while runner.shape_greenlet is not None:
        gevent.sleep(0.01)
    assert master.finished.exit_code == 2
    assert runner.shape_last_tick is None
    print(master.finished.error)
runner.quit()
"""

GIVEN_UP = """
master_of("--headless", "--expect-workers=2", "--expect-workers-max-wait=1")
gevent.sleep(100)  # as Locust does
"""

NO_PASSWORD = """
import os
os.environ.pop("SLOBENCH_WEB_PASSWORD", None)
master_of(has_page=True, has_login=True)
"""


def said_by(code, *words, exit_code=0):
    command = [sys.executable, "-P", "-c", code, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize(("how", "exit_code"), [("interrupt", 130), ("stop", 3)])
def test_a_control_process_ended_during_its_start_reports_it(how, exit_code):
    done = said_by(EARLY, how)
    assert done.stdout == f"{exit_code} stopped before the first request\n"


def test_a_start_before_any_worker_is_refused_each_time():
    done = said_by(LOCUST + NOBODY_THERE)
    assert "'success': False" in done.stdout.splitlines()[0]
    assert done.stdout.count("no worker is connected; start one with slobench worker") == 3


def test_a_master_whose_workers_do_not_come_has_no_verdict():
    done = said_by(LOCUST + GIVEN_UP, exit_code=3)
    assert "gave up after 1 s: 0 of 2 workers connected to 127.0.0.1:" in done.stderr


def test_a_page_with_a_login_but_no_password_does_not_open():
    done = said_by(LOCUST + NO_PASSWORD, exit_code=2)
    assert "SLOBENCH_WEB_PASSWORD is not set or is empty" in done.stderr
