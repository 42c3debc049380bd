"""Assignments: the share of a run that a worker receives, and the task it builds from it.

A ShardTask holds the API key and is pickled, so it does not travel. The message holds data only:
the scenario, the text of a target file, the codec's fields, and the rows. The worker builds its
task from them with the secrets of its own environment. Both sides compute the fingerprint of the
result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from pydantic import ValidationError

from loadgen.archive.store import from_parquet, to_parquet
from loadgen.drive.payloads import HttpHead
from loadgen.drive.shard import payloads_of
from loadgen.drive.task import ShardTask
from loadgen.errors import RunInvalid, ScenarioError, TargetFileError, UsageError
from loadgen.live.watching import run_labels
from loadgen.records import EDGES, PIECES, SCHEDULE, schedule_sha256
from loadgen.run.shard_tasks import Job, Share, shard_task
from loadgen.run.target import Target
from loadgen.web.control_messages import Assign, LoadPiece, PromptFitMessage, pieces
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan
from loadgen.workload.word_text import WordCounts
from loadgen.yaml_document import parse_document, read_file, write_document
from targets.address import parse_url
from targets.endpoint import DEFAULT_KEY_ENV, Endpoint, read_target

_OURS = ("reference", "mock")
_SUFFIXES = (".yaml", ".yml")
_N_SAMPLED = 8  # requests rendered for the fingerprint


@dataclass(frozen=True)
class Assignment:
    """The messages for a worker, and the fingerprint that it must return."""

    assign: Assign
    rows: list[LoadPiece]
    n_requests: int
    sha256: str


def assignments(job: Job, n_shards: int) -> list[Assignment]:
    """An assignment for each shard. Raises UsageError for a target whose secrets are in its
    file."""
    prompts = job.prompts()
    return [_assignment(job, share, prompts) for share in job.shares(n_shards)]


def _assignment(job: Job, share: Share, prompts: Prompts) -> Assignment:
    names, fit, adapter = job.scenario.names(), job.target.fit, job.target.adapter
    tables = tuple(to_parquet(table, names) for table in share.plan)
    rows = pieces(job.run_name, share.number, msgspec.msgpack.encode(tables))
    words = () if fit.words is None else zip(fit.words.words, fit.words.tokens, strict=True)
    slos_by_class = run_labels(job.scenario, job.target.to_manifest(), job.run_name).slos
    assign = Assign(
        run=job.run_name,
        shard=share.number,
        n_shards=share.n_shards,
        n_requests=share.n_requests,
        scenario=job.scenario.with_known_window().to_yaml(),
        target=target_text(job.target.endpoint),
        headers=sorted(job.target.endpoint.headers),
        adapter=adapter.model_dump(mode="json"),
        fit=PromptFitMessage(
            fit.overhead_tokens,
            fit.tokens_per_char,
            fit.turn_overhead_tokens,
            0 if fit.words is None else fit.words.overhead_tokens,
            list(words),
        ),
        salt=job.salt,
        transport=job.transport,
        slos={name: [slo.text for slo in slos_by_class[name]] for name in names.classes},
        n_pieces=len(rows),
        needs_ca_cert=job.target.endpoint.ca_cert is not None,
    )
    sha256 = fingerprint(shard_task(job, share, prompts))
    return Assignment(assign, rows, len(share.plan.schedule), sha256)


def target_text(endpoint: Endpoint) -> str:
    """The target as text without secrets. Values of headers and certificates do not travel: a
    worker that needs them has a target file of its own."""
    if endpoint.shown_url != endpoint.url:
        raise UsageError(
            "the URL's query holds a secret, which is not sent to workers: send it as a header of "
            "a target file, and start each worker with --target FILE"
        )
    values: dict[str, Any] = {"url": endpoint.url, "api": endpoint.api}
    if endpoint.has_key:
        values["api_key_env"] = endpoint.api_key_env
    if endpoint.connections != "reuse":
        values["connections"] = endpoint.connections
    if endpoint.session_header:
        values["session_header"] = list(endpoint.session_header)
    if endpoint.trace_context:
        values["trace_context"] = True
    return write_document(values)


def task_of(
    assign: Assign,
    data: bytes,
    environ: Mapping[str, str],
    own_target: Path | None,
    parts_dir: Path,
) -> ShardTask:
    """The ShardTask of an assignment on this machine. `own_target` is the worker's own target file.

    Raises UsageError where this worker cannot run the share, for example for a key that its
    environment lacks; RunInvalid for rows that cannot be read.
    """
    scenario = _scenario(assign.scenario)
    endpoint = _endpoint(assign, environ, own_target)
    if missing := sorted({*assign.headers} - {*endpoint.headers}):
        raise UsageError(
            f"the target file sets the header {missing[0]}, whose value is not sent to workers: "
            "start this worker with --target FILE"
        )
    if assign.needs_ca_cert and endpoint.ca_cert is None:
        raise UsageError(
            "the target file names a ca_cert, which is not sent to workers: start this worker with "
            "--target FILE"
        )
    try:
        adapter = endpoint.adapter(**assign.adapter)
    except ValidationError as error:
        raise UsageError(
            f"this worker's codec {endpoint.api} rejects its settings: {error}"
        ) from None
    target = Target("url", endpoint, adapter, _prompt_fit(assign.fit), [])
    part, transport = _plan(data, scenario), _transport(assign.transport)
    job = Job(scenario, part, target, transport, assign.salt, assign.run, parts_dir, True)
    share = Share(assign.shard, assign.n_shards, assign.n_requests, part)
    return shard_task(job, share, job.prompts())


def fingerprint(task: ShardTask) -> str:
    """SHA-256 (hex) of a share: its rows and the bytes of its first requests, without the request
    heads, which hold the secrets. Equal code, data and settings give equal fingerprints."""
    digest = hashlib.sha256(schedule_sha256(task.schedule, task.edges).encode())
    payloads = payloads_of(task, HttpHead("", "", ()))
    roots = np.nonzero(task.schedule["n_parents"] == 0)[0][:_N_SAMPLED]
    for row in roots:
        digest.update(payloads.take(int(row)))
    return digest.hexdigest()


def _scenario(text: str) -> Scenario:
    document = parse_document(text, "the assigned scenario", ScenarioError)
    try:
        return Scenario.model_validate(document.values)
    except ValidationError as error:
        document.note_validation(error)
        document.raise_mistakes()
        raise


def _endpoint(assign: Assign, environ: Mapping[str, str], own: Path | None) -> Endpoint:
    """The assigned target with this worker's secrets: the key in OPENAI_API_KEY if the target names
    it, and the values of its own target file if that file is for the same server. The master
    chooses both the URL and the variable's name, so a worker hands out nothing else."""
    assigned = parse_document(assign.target, "the assigned target", TargetFileError).values
    url, variable = str(assigned.get("url", "")), assigned.get("api_key_env")
    if variable is None:  # the key stays here even if it is exported
        environ = {name: value for name, value in environ.items() if name != DEFAULT_KEY_ENV}
    own_values = {} if own is None else _own_file(own)
    is_same_server = is_same_origin(str(own_values.get("url", "")), url)
    is_same_server = is_same_server or ("launch" in own_values and is_loopback(url))
    own_values.pop("launch", None)  # the control process launches the server
    if variable not in (
        None,
        DEFAULT_KEY_ENV,
        own_values.get("api_key_env") if is_same_server else None,
    ):
        raise UsageError(
            f"the run needs the key in {variable} for {url}: a worker sends only {DEFAULT_KEY_ENV} "
            "and the key that its own --target FILE names for the server in that file"
        )
    if own is None or not is_same_server:
        if own is not None and assign.headers:
            raise UsageError(f"{own} is for another server; its headers are not sent to {url}")
        return read_target(assign.target, "the assigned target", environ)
    return read_target(
        write_document({**own_values, **assigned}), str(own), environ, folder=own.parent
    )


def _own_file(path: Path) -> dict[str, Any]:
    try:
        text = read_file(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetFileError(f"target file {path} cannot be read: {error}") from None
    return dict(parse_document(text, str(path), TargetFileError).values)


def _prompt_fit(fit: PromptFitMessage) -> PromptFit:
    without_words = PromptFit(fit.overhead_tokens, fit.tokens_per_char, fit.turn_overhead_tokens)
    if not fit.words:
        return without_words
    words, tokens = zip(*fit.words, strict=True)
    return replace(without_words, words=WordCounts(fit.word_overhead_tokens, words, tokens))


def _plan(data: bytes, scenario: Scenario) -> Plan:
    try:
        schedule, edges, pieces = msgspec.msgpack.decode(data, type=tuple[bytes, bytes, bytes])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RunInvalid(f"the rows of the share cannot be decoded: {error}") from None
    names = scenario.names()
    return Plan(
        from_parquet(schedule, SCHEDULE, names),
        from_parquet(edges, EDGES, names),
        from_parquet(pieces, PIECES, names),
    )


def _transport(word: str) -> Literal["fast", "aiohttp"]:
    return "aiohttp" if word == "aiohttp" else "fast"


def is_same_origin(first_url: str, second_url: str) -> bool:
    """Whether two URLs name the same server; False for an invalid URL."""
    try:
        first, second = parse_url(first_url), parse_url(second_url)
    except TargetFileError:
        return False
    return (first.scheme, first.host, first.port, first.unix_path) == (
        second.scheme,
        second.host,
        second.port,
        second.unix_path,
    )


def is_loopback(url: str) -> bool:
    """Whether a URL names this machine, where launched servers listen."""
    host = parse_url(url).host
    return host in ("localhost", "::1") or host.startswith("127.")


def environ_for(target: str, given: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a run on `target`. It lacks the API key if the command line named another
    server, `given`: anyone with access to the page may enter any Host."""
    names_file = Path(given).suffix in _SUFFIXES or Path(given).is_file()
    may_have_key = target in (given, *_OURS) or (not names_file and is_same_origin(target, given))
    return {
        name: value for name, value in environ.items() if may_have_key or name != DEFAULT_KEY_ENV
    }
