"""slobench on Locust's events: a load shape that lasts as long as the run, messages in both
directions, and the exit code."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import gevent
import locust.stats
from locust import LoadTestShape, User, events
from locust.env import Environment
from locust.runners import (
    STATE_MISSING,
    LocalRunner,
    MasterRunner,
    Runner,
    WorkerRunner,
)

from loadgen.cli.scale import SECRET_ENV, read_secret
from loadgen.errors import RunInvalid, UsageError
from loadgen.live.live_histogram import LiveCounts
from loadgen.records import Status
from loadgen.system.endings import ending_signals
from loadgen.system.host_names import host_names
from loadgen.web.form import Settings, add_options, several, worker_environ
from loadgen.web.guarded_rpc import guard
from loadgen.web.live_frames import Ended
from loadgen.web.locust_beside import Beside, IdleUser, has_own_classes
from loadgen.web.locust_master import NO_WORKER, Master
from loadgen.web.locust_page import dress
from loadgen.web.locust_worker import ShardHost

DOWN, UP = "slobench_down", "slobench_up"
METHOD = "LLM"
_CONCLUDED_S = 120.0
_INTERRUPTED = 130
_LOCAL = "local"
_log = logging.getLogger("slobench")


class OpenLoop(LoadTestShape):
    """Active during the run. The load follows the schedule, not the number of users; users of other
    classes run beside it."""

    is_slobench = True
    session: LocustSession | None = None

    @property
    def use_common_options(self) -> bool:
        """Whether `--users` and `--spawn-rate` apply: to classes of the user's own."""
        return has_own_classes()

    def tick(self) -> tuple[int, float] | tuple[int, float, list[type[User]] | None] | None:
        session = OpenLoop.session
        if session is None or session.is_over or session.refuses():
            return None
        n = max(1, len(session.master.roster))  # constant during a run, even if workers come or go
        own, classes = session.beside.tick()
        IdleUser.fixed_count = n
        total = n + own
        return (total, total) if classes is None else (total, total, [IdleUser, *classes])

    def reset_time(self) -> None:
        super().reset_time()
        if OpenLoop.session is not None:
            OpenLoop.session.renew()
            OpenLoop.session.beside.reset()


class LocustSession:
    """A master's, or a single process's, state between two starts."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment, self._runner = environment, runner
        self._settings = Settings(environment.parsed_options)
        self.master = Master(self._send, self.present, _log.warning)
        self.beside = Beside.of(environment)
        self._was_just_started = self._is_leaving = self._has_started = self._is_stopping = False
        self._n_waiting = 0
        if isinstance(runner, MasterRunner):
            self._keep_on(runner)
        events.test_start.add_listener(lambda **_: self._start())
        events.test_stopping.add_listener(lambda **_: self._stopping())
        events.quitting.add_listener(lambda **_: self._quitting())
        runner.register_message(UP, lambda msg, **_: self.master.take(msg.node_id, msg.data))
        for number in ending_signals():
            if environment.web_ui is None or number != signal.SIGTERM:  # that Locust handles
                gevent.signal_handler(number, self._interrupted)
        if isinstance(runner, MasterRunner) and environment.web_ui is None:
            self._wait_for_workers(runner, environment.parsed_options)

    @property
    def is_over(self) -> bool:
        """Whether the shape may end; not while a stop waits for its result."""
        return self.master.finished is not None and not self._n_waiting

    def refuses(self) -> bool:
        """Ends a run that has no worker: Locust's master would start nothing and never retry."""
        if self.master.is_running or self.master.finished is not None or self.present():
            return False
        self.master.refuse(UsageError.exit_code, NO_WORKER)
        return True

    def present(self) -> list[str]:
        """The workers that answer, in order of arrival."""
        if not isinstance(self._runner, MasterRunner):
            return [_LOCAL]
        workers = [c.id for c in self._runner.clients.all if c.state != STATE_MISSING]
        return sorted(workers, key=self._runner.get_worker_index)

    def check(self, form: Mapping[str, str]) -> None:
        """Checks that a form describes a run. Raises UsageError or ScenarioError."""
        self._settings.check(self._environment.parsed_options, form)

    def press_stop(self) -> bool:
        """Handles the Stop button; True if Locust must act too. A second press waits for the result
        like the first."""
        if self._is_stopping and self.master.is_running:
            self._await_result()
            return False
        self._is_stopping = self.master.is_running
        return True

    def renew(self) -> None:
        """Prepares the next start, which is a run of its own."""
        self._has_started, self._is_stopping = True, False
        if self._was_just_started:  # a master's runner resets the shape again after the start
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
            self.master.begin(self._settings.next_run(self._environment.parsed_options))
        except UsageError as error:
            self.master.refuse(error.exit_code, str(error))

    def _keep_on(self, runner: MasterRunner) -> None:
        """Replaces the runner's own end of a test. Locust ends a test when its last worker is
        silent; here the control process decides, and waits, because a worker may come back."""
        stop, check_stopped = runner.stop, runner.check_stopped

        def must_continue() -> bool:
            was_not_stopped = not (self._is_stopping or self._is_leaving)
            return self.master.is_running and was_not_stopped and self._has_no_worker()

        def stop_unless(send_stop_to_client: bool = True) -> None:
            if not must_continue():
                stop(send_stop_to_client)

        def check_unless() -> None:
            if not must_continue():
                check_stopped()

        runner.stop, runner.check_stopped = stop_unless, check_unless

    def _has_no_worker(self) -> bool:
        """Whether Locust receives messages from no worker."""
        return isinstance(self._runner, MasterRunner) and self._runner.worker_count <= 0

    def _stopping(self) -> None:
        """Handles the Stop button: the workers stay until their rows and the result have arrived,
        so the next start finds no run active."""
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
        """Handles Ctrl-C, SIGTERM and SIGHUP: ends the run, then the process once the result has
        arrived; without a page the shape ends the process."""
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
        elif not self._has_started:
            raise SystemExit(_INTERRUPTED)  # from Locust's wait for workers, too

    def _wait_for_workers(self, runner: MasterRunner, options: Namespace) -> None:
        """Replaces Locust's wait for workers, which would end with the exit code of a missed
        SLO."""
        n, patience_s = options.expect_workers, options.expect_workers_max_wait
        options.expect_workers_max_wait = 0
        if not options.processes:
            _log.warning(f"waiting for {n} workers at {_address(runner)}")
        if patience_s:
            gevent.spawn(self._give_up_after, patience_s, runner, n)

    def _give_up_after(self, patience_s: float, runner: MasterRunner, n: int) -> None:
        if self.master.wait_until(lambda: self._has_started or self._is_leaving, patience_s):
            return
        _log.error(
            f"gave up after {patience_s:g} s: {len(runner.clients.ready)} of {n} workers connected "
            f"to {_address(runner)}; nothing was sent"
        )
        runner.quit()
        raise SystemExit(RunInvalid.exit_code)

    def _quitting(self) -> None:
        if self.master.is_running:
            # A second stop would abort the requests in flight.
            if not (self._is_leaving or self._has_no_worker()):
                self.master.stop(is_interrupt=True)
            self._await_result()
        self.master.kill()
        if self.master.finished is not None and self._environment.process_exit_code is None:
            self._environment.process_exit_code = self.master.finished.exit_code


def _address(runner: MasterRunner) -> str:
    return f"{runner.master_bind_host}:{runner.master_bind_port}"


def listen() -> None:
    """Registers slobench's handlers on Locust's events and guards its sockets. Nothing starts
    before a runner does."""
    try:
        guard(_take_secret())
    except UsageError as error:
        print(f"slobench: {error}", file=sys.stderr)  # noqa: T201 - Locust has no log yet
        raise SystemExit(error.exit_code) from None
    locust.stats.bucket_response_time = _bucket
    events.init_command_line_parser.add_listener(lambda parser, **_: add_options(parser))
    events.init.add_listener(_init)


def _take_secret() -> bytes | None:
    """The worker secret, removed from the environment: processes of a run do not inherit it."""
    secret = read_secret(os.environ)
    if secret is not None:
        del os.environ[os.environ.pop(SECRET_ENV)]
    return secret


def _init(environment: Environment, runner: Runner, web_ui: Any = None, **_: Any) -> None:
    level = logging.getLogger("locust").level  # for its tables, too: they are not the result
    logging.getLogger("locust.stats_logger").setLevel(max(logging.INFO, level))
    if isinstance(runner, (WorkerRunner, LocalRunner)):
        _be_worker(environment, runner)
    if IdleUser not in environment.user_classes:  # the command line names other classes
        environment.user_classes.append(IdleUser)
    if not isinstance(runner, WorkerRunner):
        try:
            session = OpenLoop.session = LocustSession(environment, runner)
        except UsageError as error:
            _log.error(str(error))
            raise SystemExit(error.exit_code) from None
        if not isinstance(environment.shape_class, OpenLoop):  # their file is the first
            environment.shape_class = OpenLoop()
            environment.shape_class.runner = runner
        if web_ui is not None:
            _dress(web_ui, session, environment.parsed_options)


def _dress(web_ui: Any, session: LocustSession, options: Namespace) -> None:
    allowed = several(options.allowed_host or "")
    names = host_names(options.web_host or "", allowed, socket.gethostname())
    base_path = options.web_base_path or ""
    try:
        dress(web_ui, session.master, base_path, session.check, session.press_stop, names)
    except UsageError as error:
        _log.error(str(error))
        raise SystemExit(error.exit_code) from None


def _be_worker(environment: Environment, runner: Runner) -> None:
    os.environ.update(worker_environ(environment.parsed_options, os.environ))

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

    events.quitting.add_listener(lambda **_: host.leave())
    if isinstance(runner, WorkerRunner):
        is_local = bool(environment.parsed_options.processes)

        def interrupted() -> None:
            """Ctrl-C reaches all processes of the terminal: a busy local worker leaves the
            decision to the master."""
            if not (is_local and host.is_busy):
                host.leave()
                runner.quit()

        for number in set(ending_signals()) - {signal.SIGTERM}:  # Locust handles it
            gevent.signal_handler(number, interrupted)


_BUCKETS = LiveCounts()


def _bucket(ms: float) -> float:
    """A response time (ms) with the precision of an HdrHistogram, in place of Locust's two
    digits."""
    return round(_BUCKETS.rounded(ms * 1e-3) * 1e3, 3)
