"""slobench on Locust's events: a shape that lasts as long as the run, a user that does nothing,
messages in both directions, and the exit code."""

from __future__ import annotations

import logging
import os
import signal
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import gevent
import locust.stats
from locust import LoadTestShape, User, events, task
from locust.env import Environment
from locust.runners import (
    STATE_MISSING,
    LocalRunner,
    MasterRunner,
    Runner,
    WorkerRunner,
)

from loadgen.drive.live_histogram import LiveCounts
from loadgen.errors import RunInvalid, UsageError
from loadgen.records import Status
from loadgen.web.form import Settings, add_options, of_this_machine
from loadgen.web.frames import Ended
from loadgen.web.locust_master import NOBODY, Master
from loadgen.web.locust_page import dress
from loadgen.web.locust_worker import ShardHost

DOWN, UP = "slobench_down", "slobench_up"
METHOD = "LLM"
_CONCLUDED_S = 120.0
_INTERRUPTED = 130
_LOCAL = "local"
_log = logging.getLogger("slobench")


class IdleUser(User):
    """A token, not load: Locust wants a user on each worker while a test is on."""

    @task
    def wait(self) -> None:
        gevent.sleep(3600)


class OpenLoop(LoadTestShape):
    """On while the run is; the load follows the schedule, not the number of users."""

    use_common_options = False
    session: LocustSession | None = None

    def tick(self) -> tuple[int, float] | None:
        session = OpenLoop.session
        if session is None or session.is_over or session.refuses():
            return None
        n = max(1, len(session.master.roster))  # the same while it runs, whoever comes or goes
        return n, n

    def reset_time(self) -> None:
        super().reset_time()
        if OpenLoop.session is not None:
            OpenLoop.session.renew()


class LocustSession:
    """What a master, or a single process, does from one start to the next."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment, self._runner = environment, runner
        self._settings = Settings(environment.parsed_options)
        self.master = Master(self._send, self.present, _log.warning)
        self._was_just_started = self._is_leaving = self._is_asked = self._is_stop_asked = False
        self._n_waiting = 0
        if isinstance(runner, MasterRunner):
            self._keep_on(runner)
        events.test_start.add_listener(lambda **_: self._start())
        events.test_stopping.add_listener(lambda **_: self._stopping())
        events.quitting.add_listener(lambda **_: self._quitting())
        runner.register_message(UP, lambda msg, **_: self.master.take(msg.node_id, msg.data))
        gevent.signal_handler(signal.SIGINT, self._interrupted)
        if environment.web_ui is None:  # Locust hears SIGTERM after the run, or beside its page
            gevent.signal_handler(signal.SIGTERM, self._interrupted)
        if isinstance(runner, MasterRunner) and environment.web_ui is None:
            self._wait_for_workers(runner, environment.parsed_options)

    @property
    def is_over(self) -> bool:
        """Whether the shape may end; while a stop is waited for it may not."""
        return self.master.finished is not None and not self._n_waiting

    def refuses(self) -> bool:
        """End a run that nobody is there for: Locust's master would start nothing, and never try
        again."""
        if self.master.is_running or self.master.finished is not None or self.present():
            return False
        self.master.refuse(UsageError.exit_code, NOBODY)
        return True

    def present(self) -> list[str]:
        """Workers that answer, in the order in which they came."""
        if not isinstance(self._runner, MasterRunner):
            return [_LOCAL]
        found = [c.id for c in self._runner.clients.all if c.state != STATE_MISSING]
        return sorted(found, key=self._runner.get_worker_index)

    def check(self, form: Mapping[str, str]) -> None:
        """That a run can be asked for with what the form says. Raises UsageError or
        ScenarioError."""
        self._settings.check(self._environment.parsed_options, form)

    def press_stop(self) -> bool:
        """The Stop button; whether Locust has to act on it. A second press waits with the first."""
        if self._is_stop_asked and self.master.is_running:
            self._await_result()
            return False
        self._is_stop_asked = self.master.is_running
        return True

    def renew(self) -> None:
        """The next start is a run of its own."""
        self._is_asked, self._is_stop_asked = True, False
        if self._was_just_started:  # a master's runner calls the shape again after the start
            self._was_just_started = False
        elif self.master.finished is not None:
            self.master.renew()

    def _send(self, worker: str, data: bytes) -> None:
        self._runner.send_message(DOWN, data, client_id=worker)

    def _start(self) -> None:
        self._was_just_started = isinstance(self._runner, MasterRunner)
        if self.master.is_running:
            _log.warning(self.master.why_not)
            return
        try:
            self.master.begin(self._settings.asked(self._environment.parsed_options))
        except UsageError as error:
            self.master.refuse(error.exit_code, str(error))

    def _keep_on(self, runner: MasterRunner) -> None:
        """Locust ends a test when its last worker is silent. A run is over when the conductor says
        so: it waits a little, for a worker may come back."""
        stop, check_stopped = runner.stop, runner.check_stopped

        def goes_on() -> bool:
            is_wanted = not (self._is_stop_asked or self._is_leaving)
            return self.master.is_running and is_wanted and self._is_forsaken()

        def stop_unless(send_stop_to_client: bool = True) -> None:
            if not goes_on():
                stop(send_stop_to_client)

        def check_unless() -> None:
            if not goes_on():
                check_stopped()

        runner.stop, runner.check_stopped = stop_unless, check_unless

    def _is_forsaken(self) -> bool:
        """Whether Locust hears of no worker."""
        return isinstance(self._runner, MasterRunner) and self._runner.worker_count <= 0

    def _stopping(self) -> None:
        """The Stop button: the workers are kept until their rows are here and all is told, so that
        the next start finds nothing on."""
        if not self.master.is_running:
            return
        self._n_waiting += 1
        try:
            self.master.stop(is_interrupt=False)
            self._await_result()
        finally:
            self._n_waiting -= 1

    def _await_result(self) -> None:
        self.master.wait_until(lambda: self.master.finished is not None, _CONCLUDED_S)

    def _interrupted(self) -> None:
        """Ctrl-C ends the run and, once it is told, everything; without a page the shape does."""
        if self.master.is_running:
            self.master.stop(is_interrupt=True)
        if not self._is_leaving:
            self._is_leaving = True
            gevent.spawn(self._leave)

    def _leave(self) -> None:
        if self.master.is_running:
            self._await_result()
            if self._environment.web_ui is None:
                return
        self._environment.process_exit_code = _INTERRUPTED
        self._runner.quit()
        if self._environment.web_ui is not None:
            self._environment.web_ui.stop()
        elif not self._is_asked:
            raise SystemExit(_INTERRUPTED)  # from Locust's wait for workers, too

    def _wait_for_workers(self, runner: MasterRunner, options: Namespace) -> None:
        """In the place of Locust, which would give up with the exit code of a missed promise."""
        n, patience_s = options.expect_workers, options.expect_workers_max_wait
        options.expect_workers_max_wait = 0
        if not options.processes:
            _log.warning(f"waiting for {n} workers at {_address(runner)}")
        if patience_s:
            gevent.spawn(self._give_up_after, patience_s, runner, n)

    def _give_up_after(self, patience_s: float, runner: MasterRunner, n: int) -> None:
        if self.master.wait_until(lambda: self._is_asked or self._is_leaving, patience_s):
            return
        _log.error(
            f"gave up after {patience_s:g} s: {len(runner.clients.ready)} of {n} workers connected "
            f"to {_address(runner)}; nothing was sent"
        )
        runner.quit()
        raise SystemExit(RunInvalid.exit_code)

    def _quitting(self) -> None:
        if self.master.is_running:
            if not (self._is_leaving or self._is_forsaken()):  # twice would give up what is on
                self.master.stop(is_interrupt=True)
            self._await_result()
        self.master.kill()
        if self.master.finished is not None and self._environment.process_exit_code is None:
            self._environment.process_exit_code = self.master.finished.exit_code


def _address(runner: MasterRunner) -> str:
    return f"{runner.master_bind_host}:{runner.master_bind_port}"


def listen() -> None:
    """Hang everything on Locust's events. Nothing starts before a runner does."""
    locust.stats.bucket_response_time = _bucket
    events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))
    events.init.add_listener(_init)


def _init(environment: Environment, runner: Runner, web_ui: Any = None, **_: Any) -> None:
    level = logging.getLogger("locust").level  # of its tables, too: they are not the result
    logging.getLogger("locust.stats_logger").setLevel(max(logging.INFO, level))
    if isinstance(runner, (WorkerRunner, LocalRunner)):
        _be_worker(environment, runner)
    if not isinstance(runner, WorkerRunner):
        session = OpenLoop.session = LocustSession(environment, runner)
        if web_ui is not None:
            _dress(web_ui, session, environment.parsed_options.web_base_path or "")


def _dress(web_ui: Any, session: LocustSession, base_path: str) -> None:
    try:
        dress(web_ui, session.master, base_path, session.check, session.press_stop)
    except UsageError as error:
        _log.error(str(error))
        raise SystemExit(error.exit_code) from None


def _be_worker(environment: Environment, runner: Runner) -> None:
    os.environ.update(of_this_machine(environment.parsed_options, os.environ))

    def on_ended(ended: Ended) -> None:
        if ended.status is Status.not_released:
            return
        environment.events.request.fire(
            request_type=METHOD,
            name=ended.class_name,
            response_time=1e3 * (ended.e2e_s or ended.duration_s or 0.0),
            response_length=ended.n_bytes,
            exception=None if ended.status is Status.ok else Exception(ended.status.name),
            context={},
        )

    host = ShardHost(lambda data: runner.send_message(UP, data), on_ended)
    runner.register_message(DOWN, lambda msg, **_: host.take(msg.data))
    events.quitting.add_listener(lambda **_: host.drop())
    if isinstance(runner, WorkerRunner):
        is_ours = bool(environment.parsed_options.processes)

        def interrupted() -> None:
            """Ctrl-C reaches the workers of the same terminal, too; the master decides."""
            if not (is_ours and host.is_busy):
                host.drop()
                runner.quit()

        gevent.signal_handler(signal.SIGINT, interrupted)


_BUCKETS = LiveCounts()


def _bucket(ms: float) -> float:
    """Locust's response times as exact as an HdrHistogram's, instead of two digits."""
    return round(_BUCKETS.rounded(ms * 1e-3) * 1e3, 3)
