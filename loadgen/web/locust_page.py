"""slobench's part of Locust's page: two tabs, a page of its own, and its report in place of
Locust's."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import flask
from flask import Response, request

from loadgen.cli.scale import password
from loadgen.errors import SlobenchError
from loadgen.manifest.json_section import JsonObject
from loadgen.system.cache_directory import cache_dir
from loadgen.system.host_names import HostNames
from loadgen.web.locust_master import Master
from loadgen.web.login_throttle import LoginThrottle
from reports.page import vega_bundle

SHARD_COLUMNS = {
    "name": "Share",
    "worker": "Worker",
    "state": "State",
    "scheduled": "Scheduled",
    "sent": "Sent",
    "ok": "OK",
    "failed": "Failed",
    "in_flight": "In flight",
    "lateness_p99": "Late p99 (ms)",
    "skew": "Start skew ± (ms)",
    "note": "Note",
}
_SCRIPT = '<script defer src="./slo/slo.js"></script></body>'
_CHANGING = ("/stop", "/stats/reset")
"""Locust's routes that change its state by GET."""
_SHARING = "Access-Control-"
_MOST_BYTES = 1 << 20
"""Of a form."""
_STATIC = files("loadgen.web") / "static"


def dress(
    web_ui: Any,
    master: Master,
    base_path: str,
    check: Callable[[Mapping[str, str]], None],
    press_stop: Callable[[], bool],
    names: HostNames,
) -> None:
    """Adds tabs, routes and the report to Locust's page before it is served. `check` raises for a
    form that describes no run; `names` are the page's own hosts; `press_stop` returns whether
    Locust must handle the Stop button. Raises UsageError for a login without a password."""
    app: flask.Flask = web_ui.app
    web_ui.template_args.update(
        extended_tabs=[
            {"title": "LLM SLO", "key": "slo"},
            {"title": "LLM workers", "key": "shards"},
        ],
        extended_tables=[
            {
                "key": "shards",
                "structure": [{"key": key, "title": text} for key, text in SHARD_COLUMNS.items()],
            }
        ],
        extended_csv_files=[
            {"href": "./slo/report", "title": "Open slobench's report"},
            {"href": "./slo/live.json", "title": "Present state of the run as JSON"},
        ],
    )
    app.register_blueprint(_routes(master, web_ui.auth_required_if_enabled, base_path))
    app.view_functions["locust.stats_report"] = web_ui.auth_required_if_enabled(
        lambda: _report(master)
    )
    start, stop = app.view_functions["locust.swarm"], app.view_functions["locust.stop"]
    app.view_functions["locust.swarm"] = web_ui.auth_required_if_enabled(
        lambda: _refused(master, check) or start()
    )
    app.view_functions["locust.stop"] = web_ui.auth_required_if_enabled(
        lambda: stop() if press_stop() else {"success": True, "message": "Test stopped"}
    )
    app.before_request(lambda: _reject_strangers(names))
    app.config["SESSION_COOKIE_SAMESITE"] = "Strict"
    app.config["MAX_CONTENT_LENGTH"] = app.config["MAX_FORM_MEMORY_SIZE"] = _MOST_BYTES
    after_request = app.after_request_funcs.setdefault(None, [])
    # Flask runs the first of the list last.
    after_request.insert(0, lambda response: _without_sharing(_extended(response, master)))
    if web_ui.web_login:
        _add_password_login(web_ui, base_path)


def _routes(master: Master, guard: Callable[..., Any], base_path: str) -> flask.Blueprint:
    routes = flask.Blueprint("slobench", __name__, url_prefix=f"{base_path}/slo")
    bundle: list[str] = []

    def vega() -> Response:
        if not bundle:
            bundle.append(vega_bundle(cache_dir(os.environ)))
        return Response(bundle[0], mimetype="text/javascript")

    def live() -> Response:
        since = request.args.get("since", 0, type=int)
        return Response(json.dumps(live_facts(master, since)), mimetype="application/json")

    for path, name, view in (
        ("/", "page", lambda: Response(_file("slo.html"), mimetype="text/html")),
        ("/slo.js", "script", lambda: Response(_file("slo.js"), mimetype="text/javascript")),
        ("/vega.js", "vega", vega),
        ("/live.json", "live", live),
        ("/report", "report", lambda: _report(master)),
    ):
        routes.add_url_rule(path, name, guard(view))
    return routes


def live_facts(master: Master, since: int) -> JsonObject:
    """The present state of the run; `points` holds those after the first `since` of this run."""
    form, finished = master.form, master.finished
    n_left_out = master.n_points - len(master.points)
    return {
        "state": "finished" if finished else "running" if master.is_running else "idle",
        "asked": None
        if form is None
        else {"scenario": form.scenario, "target": form.target, "slo": form.slo},
        "is_stopping": master.is_stopping,
        "facts": master.facts,
        "points": list(master.points)[max(0, since - n_left_out) :],
        "n_points": master.n_points,
        "run": master.n_runs,
        "notes": list(master.notes),
        "result": None
        if finished is None
        else {
            "exit_code": finished.exit_code,
            "verdict": finished.verdict,
            "reasons": finished.reasons,
            "slo": finished.slo,
            "error": finished.error,
            "has_report": bool(finished.directory),
        },
    }


def shard_rows(master: Master) -> list[JsonObject]:
    """Rows of the tab LLM workers; a worker without a share is idle."""
    rows = [
        {
            "name": f"{shard['shard']:03d}",
            "worker": shard["worker"],
            "state": shard["state"],
            "scheduled": shard["scheduled"],
            "sent": shard["sent"],
            "ok": shard["ok"],
            "failed": shard["failed"],
            "in_flight": shard["in_flight"],
            "lateness_p99": _ms(shard["lateness_p99_s"]),
            "skew": _ms(shard["skew_bound_s"]),
            "note": shard["note"],
        }
        for shard in master.facts.get("shards", [])
    ]
    busy = {row["worker"] for row in rows}
    idle = [worker for worker in master.present() if worker not in busy]
    return rows + [
        {**dict.fromkeys(SHARD_COLUMNS, ""), "name": "–", "worker": worker, "state": "idle"}
        for worker in idle
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def _report(master: Master) -> Response:
    finished = master.finished
    if finished is None or not finished.directory:
        text = "No report yet: it is written when a run has ended."
        return Response(text, status=404, mimetype="text/plain")
    response: Response = flask.send_file(Path(finished.directory) / "report.html", max_age=0)
    return response


def _extended(response: Response, master: Master) -> Response:
    """Locust's response with slobench's data in it. Locust caches responses, so a response may pass
    here twice."""
    response.headers.pop("Access-Control-Allow-Origin", None)
    if request.endpoint == "locust.request_stats" and response.is_json:
        stats = response.get_json()
        stats["extended_stats"] = [{"key": "shards", "data": shard_rows(master)}]
        response.set_data(json.dumps(stats))
    elif request.endpoint == "locust.index" and response.mimetype == "text/html":
        page = response.get_data(as_text=True)
        if _SCRIPT not in page:
            response.set_data(page.replace("</body>", _SCRIPT))
    return response


def _reject_strangers(names: HostNames) -> None:
    """Rejects requests under another name than the page's own, those from pages of other sites,
    which could start or stop runs through the user's browser, and bodies of unknown length."""
    host, origin = request.headers.get("Host"), request.headers.get("Origin")
    if not names.accepts(host):
        flask.abort(
            421,
            f"the host {(host or '')[:100]!r} is not a name of this page; start it with "
            "--allowed-host NAME to accept it",
        )
    if "Transfer-Encoding" in request.headers:  # it would be read as an empty form
        flask.abort(411, "a form states its length (Content-Length)")
    changes = request.method not in ("GET", "HEAD") or request.path.endswith(_CHANGING)
    if not changes:
        return
    is_cross_site = request.headers.get("Sec-Fetch-Site") == "cross-site"
    if is_cross_site or names.is_other_site(origin, host):
        flask.abort(403, f"requests from pages of {(origin or 'other sites')[:100]} are rejected")


def _without_sharing(response: Response) -> Response:
    """Removes the headers by which Locust lets pages of any site read its responses, and forbids
    pages of any site to show them in a frame."""
    for name in [name for name in response.headers.keys() if name.startswith(_SHARING)]:  # noqa: SIM118
        del response.headers[name]
    response.headers["X-Frame-Options"] = "DENY"
    response.headers["Content-Security-Policy"] = "frame-ancestors 'none'"
    return response


def _refused(master: Master, check: Callable[[Mapping[str, str]], None]) -> Response | None:
    """The response to a start that cannot run. Locust would accept the form, close it, and show an
    empty page."""
    reason = master.why_not
    try:
        if reason is None:
            check(request.form)
            return None
    except SlobenchError as error:
        reason = str(error)
    return flask.jsonify(
        {"success": False, "message": reason, "host": request.form.get("host", "")}
    )


def _add_password_login(web_ui: Any, base_path: str) -> None:
    from flask_login import UserMixin, login_user  # type: ignore[import-untyped]  # has no types

    expected = password(os.environ)
    web_ui.app.secret_key = secrets.token_bytes(32)

    class Person(UserMixin):  # type: ignore[misc]  # the library has no types
        id = "user"

    web_ui.login_manager.user_loader(lambda name: Person() if name == Person.id else None)
    path = f"{base_path}/slo/password"
    web_ui.auth_args.update(
        custom_form={
            "inputs": [{"label": "Password", "name": "password", "is_secret": True}],
            "callback_url": path,
            "submit_button_text": "Log in",
        },
        title="slobench",
    )

    throttle = LoginThrottle(time.monotonic)

    def log_in() -> Any:
        caller = request.remote_addr or ""
        if wait_s := throttle.wait_s(caller):
            flask.session["auth_error"] = f"Too many attempts: wait {wait_s:.0f} s."
            return flask.redirect(flask.url_for("locust.login"))
        if hmac.compare_digest(request.form.get("password", "").encode(), expected.encode()):
            throttle.passed(caller)
            login_user(Person())
            return flask.redirect(flask.url_for("locust.index"))
        throttle.failed(caller)
        flask.session["auth_error"] = "Wrong password."
        return flask.redirect(flask.url_for("locust.login"))

    web_ui.app.add_url_rule(path, "slobench_password", log_in, methods=["POST"])


def _file(name: str) -> str:
    return (_STATIC / name).read_text("utf-8")
