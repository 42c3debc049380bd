"""Our part of Locust's page: two tabs, a page of our own, and our report where Locust links its."""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flask import (
    Blueprint,
    Flask,
    Response,
    abort,
    jsonify,
    redirect,
    request,
    send_file,
    session,
    url_for,
)

from loadgen.cli.parse import cache_dir
from loadgen.cli.scale import password
from loadgen.errors import SlobenchError
from loadgen.web.locust_master import Master
from reports.bundle import vega_bundle

SHARD_COLUMNS = {
    "name": "Shard",
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
_STATIC = files("loadgen.web") / "static"


def dress(
    web_ui: Any,
    master: Master,
    base_path: str,
    check: Callable[[Mapping[str, str]], None],
    press_stop: Callable[[], bool],
) -> None:
    """Hang tabs, routes and the report on Locust's page before it is served. `check` raises for a
    form that is no run; `press_stop` says whether Locust has to act on the button. Raises
    UsageError for a login without a password."""
    app: Flask = web_ui.app
    web_ui.template_args.update(
        extended_tabs=[{"title": "LLM SLO", "key": "slo"}, {"title": "Shards", "key": "shards"}],
        extended_tables=[
            {
                "key": "shards",
                "structure": [{"key": key, "title": text} for key, text in SHARD_COLUMNS.items()],
            }
        ],
        extended_csv_files=[
            {"href": "./slo/report", "title": "Open the report of slobench"},
            {"href": "./slo/live.json", "title": "The run so far as JSON"},
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
        lambda: stop() if press_stop() else jsonify({"success": True, "message": "Test stopped"})
    )
    app.before_request(_refuse_strangers)
    changed = app.after_request_funcs.setdefault(None, [])
    changed.insert(0, lambda response: _changed(response, master))  # the first here is the last
    if web_ui.web_login:
        _ask_for_password(web_ui, base_path)


def _routes(master: Master, guard: Callable[..., Any], base_path: str) -> Blueprint:
    routes = Blueprint("slobench", __name__, url_prefix=f"{base_path}/slo")
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


def live_facts(master: Master, since: int) -> dict[str, Any]:
    """The run as of now; of the points those after the first `since` of this run."""
    asked, finished = master.asked, master.finished
    n_left_out = master.n_points - len(master.points)
    return {
        "state": "finished" if finished else "running" if master.is_running else "idle",
        "asked": None
        if asked is None
        else {"scenario": asked.scenario, "target": asked.target, "slo": asked.slo},
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
            "error": finished.error,
            "has_report": bool(finished.directory),
        },
    }


def shard_rows(master: Master) -> list[dict[str, Any]]:
    """Rows of the Shards tab; a worker without a share is idle."""
    rows = [
        {
            "name": f"{shard['shard']:03d}",
            "worker": shard["worker"],
            "state": shard["state"],
            "scheduled": shard["scheduled"],
            "sent": shard["sent"],
            "ok": shard["ok"],
            "failed": shard["ended"] - shard["ok"],
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
        text = "There is no report yet: a run has to end first."
        return Response(text, status=404, mimetype="text/plain")
    response: Response = send_file(Path(finished.directory) / "report.html", max_age=0)
    return response


def _changed(response: Response, master: Master) -> Response:
    """Locust's own answers with ours in them. Its answers may be remembered and come by twice."""
    response.headers.pop("Access-Control-Allow-Origin", None)
    if request.endpoint == "locust.request_stats" and response.is_json:
        told = response.get_json()
        told["extended_stats"] = [{"key": "shards", "data": shard_rows(master)}]
        response.set_data(json.dumps(told))
    elif request.endpoint == "locust.index" and response.mimetype == "text/html":
        page = response.get_data(as_text=True)
        if _SCRIPT not in page:
            response.set_data(page.replace("</body>", _SCRIPT))
    return response


def _refuse_strangers() -> None:
    """A page of another site may not start or stop runs through the user's browser."""
    origin = request.headers.get("Origin")
    if request.method == "POST" and origin and urlsplit(origin).netloc != request.host:
        abort(403, f"a page of {origin} may not do this")


def _refused(master: Master, check: Callable[[Mapping[str, str]], None]) -> Response | None:
    """A start for which Locust would take the form's values, close it, and show an empty page."""
    why = master.why_not
    try:
        if why is None:
            check(request.form)
            return None
    except SlobenchError as error:
        why = str(error)
    return jsonify({"success": False, "message": why, "host": request.form.get("host", "")})


def _ask_for_password(web_ui: Any, base_path: str) -> None:
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

    def enter() -> Any:
        if hmac.compare_digest(request.form.get("password", "").encode(), expected.encode()):
            login_user(Person())
            return redirect(url_for("locust.index"))
        session["auth_error"] = "This is not the password."
        return redirect(url_for("locust.login"))

    web_ui.app.add_url_rule(path, "slobench_password", enter, methods=["POST"])


def _file(name: str) -> str:
    return (_STATIC / name).read_text("utf-8")
