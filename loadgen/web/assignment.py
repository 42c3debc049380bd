"""A shard's task as it goes to a worker, and what the worker makes of it.

A ShardTask holds the API key and is pickled; neither may travel. What travels is data: the
scenario, a target file's text, the codec's fields, and the rows. Each worker builds its task of
them with its own environment, and both ends take the fingerprint of what came out.
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

from loadgen.drive.payloads import HttpHead
from loadgen.drive.shard import payloads_of
from loadgen.drive.store import from_parquet, to_parquet
from loadgen.drive.task import ShardTask
from loadgen.errors import RunInvalid, ScenarioError, TargetFileError, UsageError
from loadgen.live.watching import run_labels
from loadgen.records import EDGES, SCHEDULE
from loadgen.run.shard_tasks import Job, Share, shard_task
from loadgen.run.target import Target
from loadgen.web.control_messages import Assign, LoadPiece, PromptFitMessage, pieces
from loadgen.web.credentials import is_loopback, is_same_origin
from loadgen.workload.prompts import PromptFit, Prompts
from loadgen.workload.scenario import Scenario
from loadgen.workload.schedule import Plan, schedule_sha256
from loadgen.workload.word_text import WordCounts
from loadgen.yaml_document import parse_document, write_document
from targets.endpoint import DEFAULT_KEY_ENV, Endpoint, read_target

_N_SAMPLED = 8  # requests that are written out for the fingerprint


@dataclass(frozen=True)
class Assignment:
    """What one worker is told, and the fingerprint that it has to answer."""

    assign: Assign
    rows: list[LoadPiece]
    n_requests: int
    sha256: str


def assignments(job: Job, n_shards: int) -> list[Assignment]:
    """One for each shard. Raises UsageError for a target whose secrets are in its file."""
    prompts = job.prompts()
    return [_assignment(job, share, prompts) for share in job.shares(n_shards)]


def _assignment(job: Job, share: Share, prompts: Prompts) -> Assignment:
    names, fit, adapter = job.scenario.names(), job.target.fit, job.target.adapter
    tables = (to_parquet(share.plan.schedule, names), to_parquet(share.plan.edges, names))
    rows = pieces(job.run_name, share.number, msgspec.msgpack.encode(tables))
    words = () if fit.words is None else zip(fit.words.words, fit.words.tokens, strict=True)
    promised = run_labels(job.scenario, job.target.to_manifest(), job.run_name).slos
    assign = Assign(
        run=job.run_name,
        shard=share.number,
        n_shards=share.n_shards,
        n_requests=share.n_requests,
        scenario=job.scenario.to_yaml(),
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
        promises={name: [slo.text for slo in promised[name]] for name in names.classes},
        n_pieces=len(rows),
        needs_ca_cert=job.target.endpoint.ca_cert is not None,
    )
    sha256 = fingerprint(shard_task(job, share, prompts))
    return Assignment(assign, rows, len(share.plan.schedule), sha256)


def target_text(endpoint: Endpoint) -> str:
    """A target file that says where to send and how, without a secret in it. Values of headers and
    certificates do not travel: a worker that needs them has a target file of its own."""
    told: dict[str, Any] = {"url": endpoint.url, "api": endpoint.api}
    if endpoint.has_key:
        told["api_key_env"] = endpoint.api_key_env
    if endpoint.connections != "reuse":
        told["connections"] = endpoint.connections
    return write_document(told)


def task_of(
    assign: Assign,
    data: bytes,
    environ: Mapping[str, str],
    own_target: Path | None,
    parts_dir: Path,
) -> ShardTask:
    """The task that an assignment means here. `own_target` is the worker's own target file.

    Raises UsageError where this worker cannot do it, such as for a key that its environment lacks;
    RunInvalid for rows that are none.
    """
    scenario = _scenario(assign.scenario)
    endpoint = _endpoint(assign, environ, own_target)
    if missing := sorted({*assign.headers} - {*endpoint.headers}):
        raise UsageError(
            f"the target file sets the header {missing[0]}, whose value does not travel: start "
            "this worker with --target FILE"
        )
    if assign.needs_ca_cert and endpoint.ca_cert is None:
        raise UsageError(
            "the target file names a ca_cert, which does not travel: start this worker with "
            "--target FILE"
        )
    try:
        adapter = endpoint.adapter(**assign.adapter)
    except ValidationError as error:
        raise UsageError(f"the codec {endpoint.api} of this worker: {error}") from None
    target = Target("url", endpoint, adapter, _prompt_fit(assign.fit), [])
    part, transport = _plan(data, scenario), _transport(assign.transport)
    job = Job(scenario, part, target, transport, assign.salt, assign.run, parts_dir, True)
    share = Share(assign.shard, assign.n_shards, assign.n_requests, part)
    return shard_task(job, share, job.prompts())


def fingerprint(task: ShardTask) -> str:
    """SHA-256 (hex) of a share: its rows, and the bytes of its first requests as they will be sent,
    but for the secrets in front of them. Equal code, data and settings give equal ones."""
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
    """What was told, with this worker's own secrets: the key in OPENAI_API_KEY if it is asked for,
    and what its own target file has for that file's server. Whoever is the master names both a URL
    and a variable, so nothing else is given away."""
    told = parse_document(assign.target, "the assigned target", TargetFileError).values
    url, variable = str(told.get("url", "")), told.get("api_key_env")
    if variable is None:  # not even where it is exported here
        environ = {name: value for name, value in environ.items() if name != DEFAULT_KEY_ENV}
    file = {} if own is None else _own_file(own)
    is_for_it = is_same_origin(str(file.get("url", "")), url)
    is_for_it = is_for_it or ("launch" in file and is_loopback(url))
    file.pop("launch", None)  # that is the conductor's to do
    if variable not in (None, DEFAULT_KEY_ENV, file.get("api_key_env") if is_for_it else None):
        raise UsageError(
            f"the key in {variable} is asked for, to be sent to {url}: a worker gives "
            f"{DEFAULT_KEY_ENV} only, and what its own --target FILE names for the server in it"
        )
    if own is None or not is_for_it:
        if own is not None and assign.headers:
            raise UsageError(f"{own} is for another server: its headers are not sent to {url}")
        return read_target(assign.target, "the assigned target", environ)
    return read_target(write_document({**file, **told}), str(own), environ, folder=own.parent)


def _own_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TargetFileError(f"target file {path}: cannot be read: {error}") from None
    return dict(parse_document(text, str(path), TargetFileError).values)


def _prompt_fit(fit: PromptFitMessage) -> PromptFit:
    found = PromptFit(fit.overhead_tokens, fit.tokens_per_char, fit.turn_overhead_tokens)
    if not fit.words:
        return found
    words, tokens = zip(*fit.words, strict=True)
    return replace(found, words=WordCounts(fit.word_overhead_tokens, words, tokens))


def _plan(data: bytes, scenario: Scenario) -> Plan:
    try:
        schedule, edges = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise RunInvalid(f"the rows of the share cannot be read: {error}") from None
    names = scenario.names()
    return Plan(from_parquet(schedule, SCHEDULE, names), from_parquet(edges, EDGES, names))


def _transport(word: str) -> Literal["fast", "aiohttp"]:
    return "aiohttp" if word == "aiohttp" else "fast"
