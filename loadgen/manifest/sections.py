"""manifest.json: the circumstances of a run, one typed value per section of the file.

The manifest is written before the first request and completed at the end of the run. Each field is
a key of the file.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from loadgen.errors import RunInvalid
from loadgen.manifest.json_section import JsonObject, JsonSection, read_section
from loadgen.manifest.self_report import ClientReport

SCHEMA = 3
Ended = Literal["running", "completed", "stopped", "interrupted"]
EndKind = Literal["other", "refused", "silent"]
"""Why a run was stopped: its first requests all failed alike, the server fell silent, or another
reason."""


class LimitsSection(JsonSection, frozen=True):
    """The scenario's `limits` that decide which requests wait in the client."""

    max_concurrency: int | None = None
    when_full: str = "drop"


class ScenarioSection(JsonSection, frozen=True):
    """The scenario that was run. `text` is its YAML with every change applied, `resolved` the same
    with all defaults, `sha256` the hash of `text`. `source` is the file or the shipped scenario
    that it was read from, "" for a scenario made of flags or in Python."""

    name: str
    source: str
    text: str
    resolved: JsonObject
    sha256: str

    @property
    def limits(self) -> LimitsSection:
        return msgspec.convert(self.resolved.get("limits", {}), LimitsSection)

    @property
    def arrivals(self) -> JsonObject:
        """`kind` and the keys of that kind; empty where each class has arrivals of its own."""
        return self.resolved.get("arrivals") or {}


class ClassSection(JsonSection, frozen=True, omit_defaults=True):
    """One class of traffic. `slo` holds the SLOs of this class alone; those of all traffic are the
    manifest's. `requested_rate_per_s`: as in the manifest, of this class."""

    slo: tuple[str, ...]
    priority: int
    tenant: str
    is_closed_loop: bool
    requested_rate_per_s: float | None = None


class LabelsSection(JsonSection, frozen=True, omit_defaults=True):
    """Software and hardware of the server, as declared in the target file."""

    engine: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    version: str | None = None
    flags: str | None = None


class LaunchSection(JsonSection, frozen=True):
    """The command that started the server, without secrets; `env` are names of variables."""

    preset: str | None
    command: str
    model: str
    env: tuple[str, ...]


class TargetSection(JsonSection, frozen=True, kw_only=True, omit_defaults=True):
    """The server under test, without secrets. A simulated engine has `kind`, `url`, `model`,
    `policy` and `labels`; its other fields are None.

    `kind` is `url`, `launched`, `reference`, `mock` or `sim`. `headers` are names without values;
    `api_key_env` names the variable that held the key. `ignore_eos`: the server accepts it, so
    answers have the planned length. `prompt_fit` is (tokens of the chat template, tokens per
    character of a prompt). `metrics` are the addresses of the server's own metrics, empty where
    they were not read; `prompt_words` is the number of words with a known length in tokens.
    `stream` False: answers were requested as a whole. `results`: what answers hold in place of
    tokens (`vectors`, `scores`), "" for tokens. `recorded_prompts` is the number of different
    recorded prompts that are sent without a salt; None: every prompt is new. `is_bundled`: it is
    the bundled engine, by its list of models.
    """

    kind: str
    url: str
    api: str | None = None
    model: str
    api_key_env: str | None
    extra_body: JsonObject | None = None
    connections: str | None = None
    session_header: tuple[str, ...] = ()
    headers: tuple[str, ...] | None = None
    policy: JsonObject | None = None
    labels: LabelsSection
    launch: LaunchSection | None = None
    proxy: str | None = None
    ignore_eos: bool | None = None
    prompt_fit: tuple[float, float] | None = None
    metrics: tuple[str, ...] | None = None
    prompt_words: int | None = None
    stream: bool = True
    results: str = ""
    recorded_prompts: int | None = None
    is_bundled: bool = False


class PreflightLine(JsonSection, frozen=True):
    """One check of the preflight. `ok` None: not known, or no fault."""

    check: str
    ok: bool | None
    detail: str


class NamesSection(JsonSection, frozen=True):
    """Names of the classes and tenants, in the order of their ids in the tables."""

    classes: tuple[str, ...]
    tenants: tuple[str, ...]


class WindowSection(JsonSection, frozen=True, omit_defaults=True):
    """Planned lengths of warm-up, measured window and drain, seconds. `ended_s` is the time, since
    the run's epoch, at which releasing stopped early; None where it did not. `requests`: the number
    of measured requests that ended the window during the run, so that `measure_s` is its actual
    length; None for a window of planned length. `started_s`: the time, since the epoch, at which
    the start of a closed loop ends, which the figures leave out; None where nothing is left out."""

    warmup_s: float
    measure_s: float
    drain_s: float
    ended_s: float | None = None
    requests: int | None = None
    started_s: float | None = None


class InstrumentLimits(JsonSection, frozen=True):
    """Limits above which the client itself is the bottleneck. `lateness_s` None: derived from the
    TTFT limit."""

    lateness_s: float | None
    loop_lag_s: float
    read_backlog_s: float
    cpu_share: float
    run_delay_share: float


class HostSection(JsonSection, frozen=True):
    """The machine that ran slobench. `cpus` counts the CPUs that the process may use."""

    hostname: str
    cpus: int | None
    cpu_model: str
    platform: str
    python: str


class Scrapes(JsonSection, frozen=True):
    """Readings of the server's metrics; `reason` is why the first of `n_failed` failed."""

    n: int
    n_failed: int
    reason: str


class CanarySection(JsonSection, frozen=True, kw_only=True):
    """Canaries of a run: `share` of its requests were sent in addition, with `prompts` different
    prompts. `idle` and `loaded` count answers by kind (`targets.canary.KINDS`), against the first
    answer to the same prompt at idle: those of repeats at idle, and those under load. `at_idle` and
    `under_load` are the beginnings of the first pair that differed, "" where none did."""

    share: float
    prompts: int
    idle: dict[str, int]
    loaded: dict[str, int]
    at_idle: str = ""
    under_load: str = ""


class ReplicaSection(JsonSection, frozen=True, omit_defaults=True):
    """One of several simulated engines, or a pipeline: the requests that it received, the mean
    number of requests in it, and the share of the run in which it computed a step, of a pipeline
    the mean of its stages. `bubble_share` is the share of the stages' time that they were idle
    while a batch was in the pipeline, None without a pipeline. `role` is `prefill` or
    `decode` where each request is computed by two; the KV that it sent and received is in bytes,
    and `link_share` is the share of the run in which it sent. `on_share` is the share of the run in
    which it was switched on, its starts and repairs included."""

    name: str
    requests: int
    mean_requests: float
    busy_share: float
    steps: int
    preemptions: int
    cached_tokens: int
    role: str = "both"
    sent_kv_bytes: float = 0.0
    received_kv_bytes: float = 0.0
    link_share: float = 0.0
    failures: int = 0
    on_share: float = 1.0
    bubble_share: float | None = None


class TransferSection(JsonSection, frozen=True):
    """Transfers of requests and their KV between simulated replicas: their number and bytes, the
    mean pause of a request for copying (s, with the wait for links), and its mean wait for memory
    of the receiving replica (s). `migrated` of the requests were decoding, to balance loads."""

    requests: int
    migrated: int
    kv_bytes: float
    mean_copy_s: float
    mean_wait_s: float


class FailureSection(JsonSection, frozen=True):
    """Failures of simulated replicas: their number, how often a request was sent again to another
    replica, and the requests that failed."""

    failures: int
    retried: int
    lost: int


class ScalingSection(JsonSection, frozen=True):
    """Autoscaling of simulated replicas: how many were started, and the mean number that was
    on."""

    starts: int
    mean_replicas: float


class HostMemorySection(JsonSection, frozen=True):
    """KV that simulated engines copied to host memory and back (bytes), and the time of their steps
    for it (s)."""

    out_bytes: float
    back_bytes: float
    copying_s: float


class SimulatedEngineSection(JsonSection, frozen=True, omit_defaults=True):
    """Counters of a simulated engine, of all replicas together. `waits_s`: class → reason → seconds
    that requests of the measured window waited. The run took `simulated_s` of virtual and `wall_s`
    of real time. `router` and `replicas` are there where it has several replicas, `transfers` where
    requests move between them, `failures` and `scaling` where replicas fail, start and stop, `host`
    where KV was copied to host memory. `core` is `compiled` where the step core in C computed the
    steps, else `python: ` and the reason."""

    steps: int
    preemptions: int
    padding_tokens: int
    cached_tokens: int
    waits_s: dict[str, dict[str, float]]
    simulated_s: float
    wall_s: float
    router: str = ""
    replicas: tuple[ReplicaSection, ...] = ()
    transfers: TransferSection | None = None
    failures: FailureSection | None = None
    scaling: ScalingSection | None = None
    host: HostMemorySection | None = None
    core: str = ""


class FrameCounts(JsonSection, frozen=True):
    """Counts of the last message of a worker on another machine; `by_status` as in
    `records.Status`."""

    now_s: float
    released: int
    sent: int
    by_status: tuple[int, ...]


class WorkerSection(JsonSection, frozen=True):
    """One worker of a distributed run. Its clock was known to ± `start_skew_bound_s`; `note` is the
    reason for a `state` other than `done`."""

    shard: int
    worker: str
    host: str
    n_requests: int
    state: str
    note: str
    start_skew_bound_s: float | None
    last_frame: FrameCounts | None


class LiveQuantiles(JsonSection, frozen=True):
    """Quantiles of a live metric over the whole run, seconds; None without samples."""

    n: int
    p50: float | None
    p90: float | None
    p99: float | None
    p999: float | None
    max: float | None


class ImportedSection(JsonSection, frozen=True, omit_defaults=True):
    """Origin of a run that another tool measured (`slobench import`). `part` is the number of the
    result in its file, from 0. `missing` are the things that the file does not record, each with
    its consequence, as clauses. `version` is "" where the file does not state it; `duration_s` is
    the length of the run that the tool's rates count, None where it is not stated. Without
    `has_send_times` the times of the requests are those of the requested load."""

    tool: str
    file: str
    file_sha256: str
    missing: tuple[str, ...]
    version: str = ""
    part: int = 0
    duration_s: float | None = None
    has_send_times: bool = True

    @property
    def tool_text(self) -> str:
        """`aiperf 0.13.0`, or the tool alone where its version is not known."""
        return f"{self.tool} {self.version}".rstrip()


class Manifest(JsonSection, frozen=True, kw_only=True, omit_defaults=True):
    """The manifest of a run.

    `command` holds no secret. `salt` (hexadecimal) was mixed into the prompts, "" for none. `slo`
    holds the SLOs of all traffic. `requested_rate_per_s` is the mean rate that the scenario's
    arrivals state for the measured window, of requests or of the starts of sessions and chains;
    None with a closed loop. `clock` is `virtual` for a
    simulated run. `git` is the commit of the working directory, "" outside of a repository.
    `epoch_monotonic_s` is the run's epoch on CLOCK_MONOTONIC, from which all times in the tables
    count, and `epoch_utc` the same instant; both are None until the run has ended. `server_ended_s`
    is the time, since the epoch, at which a server that slobench had started ended by itself; None
    where it did not. `n_bad_messages`, `workers` and `live` (metric → quantiles) belong to a
    distributed run, `engine` to a simulated one, and `scrapes` to a run that read the server's
    metrics; they are None for other runs. With fewer successful requests than `min_requests` the
    run has no verdict. `silent_since_s`: no byte came any more after this time, for which the run
    was stopped. `too_long_at` are the first `file:line` of prompts that the server refused for
    their length. `dead_workers` are the numbers of the workers that died during the run.
    `imported` is the origin of a run that another tool measured, None for a run of slobench. The
    schedule has `n_requests` planned rows, which `schedule_sha256` covers,
    and `extended_rows` that were added during the run for users of a closed loop who got through
    theirs. `prompt_sharing` is `exact` where the prompts of a trace share all blocks that they
    shared in the trace; "" for other runs, and where each prompt kept a single shared prefix.
    `canary` counts the canaries of a run that sent some.
    """

    run: str
    slobench: str
    command: tuple[str, ...]
    scenario: ScenarioSection
    seed: int
    salt: str
    schedule_sha256: str
    n_requests: int
    slo: tuple[str, ...]
    classes: dict[str, ClassSection]
    target: TargetSection
    preflight: tuple[PreflightLine, ...]
    names: NamesSection
    window: WindowSection
    instrument_limits: InstrumentLimits
    clock: str
    host: HostSection
    versions: dict[str, str]
    git: str
    started_utc: str
    ended: Ended
    end_reason: str
    end_kind: EndKind = "other"
    silent_since_s: float | None = None
    too_long_at: tuple[str, ...] = ()
    requested_rate_per_s: float | None = None
    transport: str | None = None
    epoch_monotonic_s: float | None = None
    epoch_utc: str | None = None
    server_ended_s: float | None
    n_bad_messages: int | None = None
    workers: tuple[WorkerSection, ...] | None = None
    live: dict[str, LiveQuantiles] | None = None
    scrapes: Scrapes | None = None
    engine: SimulatedEngineSection | None = None
    min_requests: int = 0
    extended_rows: int = 0
    dead_workers: tuple[int, ...] = ()
    imported: ImportedSection | None = None
    prompt_sharing: str = ""
    canary: CanarySection | None = None

    def to_json(self) -> JsonObject:
        return {"schema": SCHEMA, **super().to_json()}

    @property
    def epoch_s(self) -> float:
        """The epoch of a run that has ended, seconds on CLOCK_MONOTONIC."""
        assert self.epoch_monotonic_s is not None, f"run {self.run} has not ended"
        return self.epoch_monotonic_s

    @property
    def all_slos(self) -> tuple[str, ...]:
        """The SLOs of all traffic and those of each class."""
        return (*self.slo, *(text for own in self.classes.values() for text in own.slo))

    @property
    def has_closed_loop(self) -> bool:
        """Whether the requests of any class wait for earlier ones of the same user."""
        return any(traffic.is_closed_loop for traffic in self.classes.values())

    def class_slos(self, name: str) -> tuple[str, ...]:
        """The SLOs of one class alone."""
        return self.classes[name].slo if name in self.classes else ()


def read_manifest(content: object, where: str) -> Manifest:
    """The manifest in decoded JSON; `where` is the file, for messages.

    Raises RunInvalid that names the file, the key and its value for a manifest that is malformed or
    of another schema.
    """
    _check_schema(content, where)
    manifest = read_section(content, Manifest, where)
    limits = manifest.scenario.resolved.get("limits", {})
    read_section(limits, LimitsSection, f"{where}: scenario.resolved.limits")
    return manifest


def read_client_report(content: object, where: str) -> ClientReport:
    """The key `instrument` of decoded manifest.json, empty before the end of a run. Raises as
    `read_manifest` does."""
    own = content.get("instrument", {}) if isinstance(content, dict) else {}
    return read_section(own, ClientReport, f"{where}: instrument")


def text_sha256(text: str) -> str:
    """SHA-256 of a scenario's text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _check_schema(content: object, where: str) -> None:
    if not isinstance(content, dict):
        raise RunInvalid(f"{where}: expected an object, found a {type(content).__name__}")
    schema = content.get("schema")
    if type(schema) is not int or schema < 1:  # not a bool either
        raise RunInvalid(f"{where}: schema: expected {SCHEMA}, found {schema!r}")
    if schema != SCHEMA:
        raise RunInvalid(
            f"{where}: schema {schema} was written by slobench {content.get('slobench')}; this "
            f"version reads schema {SCHEMA}"
        )
