"""Translation of inference-perf's configuration file."""

from __future__ import annotations

from math import log, sqrt
from pathlib import Path
from typing import Any

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.translate.draft import Draft, Flags, Keys, around, rate_text, refuse
from loadgen.units import write_duration
from loadgen.yaml_document import parse_document, read_file

_IGNORED_BLOCKS = ("report", "metrics", "storage", "tokenizer")
_IGNORED_LOAD = ("num_workers", "worker_max_tcp_connections", "stage_teardown_grace_seconds")
_SINGLE = (
    "mock",
    "random",
    "synthetic",
    "shareGPT",
    "infinity_instruct",
    "cnn_dailymail",
    "billsum_conversations",
)
"""Types of data whose items are requests of text of their own."""
_TRACE_FORMATS = {"AzurePublicDataset": "azure"}


def translate(words: list[str]) -> Draft:
    """The draft for the words after `inference-perf`: reads the configuration file that they name.

    Raises UsageError if it cannot be read.
    """
    flags = Flags(words, {"-c": "config-file"})
    path = flags.text("config-file", "config")
    stated = [name for name in flags.names() if "." in name]
    if path is None and not stated:
        raise UsageError(
            "inference-perf needs --config_file FILE or flags such as --server.base_url; or pass "
            "the file's text"
        )
    values: JsonObject = {}
    if path is not None:
        try:
            text = read_file(Path(path)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--config_file {path}: cannot be read ({error})") from None
        values = parse_document(text, path, UsageError).values
    for name in stated:
        value = flags.text(name) or ""
        _set(values, name, parse_document(f"v: {value}", f"--{name}", UsageError).values["v"])
    draft = _translate_values(values)
    return draft.finish(flags, "log-level")


def _set(values: JsonObject, name: str, value: Any) -> None:
    """Set the key of a dotted flag over those of the file: --load.num-workers is
    load.num_workers."""
    *parents, last = name.replace("-", "_").split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise UsageError(f"--{name}: {parent} has a value of its own")
        values = inner
    values[last] = value


def translate_text(text: str, label: str = "inference-perf") -> Draft:
    """The draft for the text of a configuration file."""
    return _translate_values(parse_document(text, label, UsageError).values)


def _translate_values(values: JsonObject) -> Draft:
    draft = Draft("inference-perf")
    config = Keys(values, "inference-perf")
    for block in _IGNORED_BLOCKS:
        config.get(block)
    api = config.nested("api")
    kind = api.text("type") or "completion"
    if kind not in ("chat", "completion", "completions", "responses"):
        words = "slobench supports chat, completions and responses only"
        refuse(f"inference-perf api type={kind}", words)
    draft.api = "completions" if kind == "completion" else kind
    api.get("streaming")
    draft.add_left(api)
    _server(config.nested("server"), draft)
    _data(config.nested("data"), draft)
    _load(config.nested("load"), draft)
    draft.add_left(config)
    return draft


def _server(server: Keys, draft: Draft) -> None:
    draft.url = server.text("base_url") or draft.url
    draft.model = server.text("model_name")
    server.get("type")
    if server.get("ignore_eos") is False:
        draft.extra_body["ignore_eos"] = False
    draft.add_left(server)


def _data(data: Keys, draft: Draft) -> None:
    kind, path = data.text("type") or "mock", data.text("path")
    if kind == "shared_prefix":
        _shared_prefix(data.nested("shared_prefix"), draft)
    elif kind == "shareGPT" and path:
        draft.prompts = {"kind": "sharegpt", "path": path}
    else:
        if kind not in _SINGLE:
            refuse(
                f"inference-perf data type={kind}",
                "it is no text of single requests; see --dataset FILE, --trace FILE and `session` "
                "in docs/scenarios.md",
            )
        if kind not in ("random", "synthetic"):
            draft.add_missing(
                f"inference-perf data type={kind}", "synthetic prompts of stated lengths instead"
            )
        for key, name in (
            ("input_tokens", "input_distribution"),
            ("output_tokens", "output_distribution"),
        ):
            draft.requests[key] = _length(data.nested(name), draft)
    draft.add_left(data)


def _length(law: Keys, draft: Draft) -> Any:
    """A length. inference-perf clips at the bounds, slobench draws again."""
    kind = law.text("type") or "normal"
    low, high = law.number("min"), law.number("max")
    low, high = 10.0 if low is None else low, 1024.0 if high is None else high
    mean, sd, variance = law.number("mean"), law.number("std_dev"), law.number("variance")
    mean = 512.0 if mean is None else mean
    sd = sqrt(variance) if variance is not None else 200.0 if sd is None else sd
    law.get("total_count")
    draft.add_left(law)
    if low == high:
        return round(low)
    if kind == "fixed":
        return round(mean)
    if kind == "uniform":
        return {"kind": "uniform", "min": max(1, round(low)), "max": round(high)}
    if kind == "lognormal":
        # mean and deviation of the lengths, as those of ln N(ln median, sigma²)
        sigma2 = log(1 + (sd / mean) ** 2)
        median = float(f"{mean / sqrt(1 + (sd / mean) ** 2):.6g}")
        bounds = {"min": max(1, round(low)), "max": round(high)}
        return {"kind": "lognormal", "median": median, "sigma": round(sqrt(sigma2), 6), **bounds}
    if kind != "normal":
        draft.add_missing(f"inference-perf distribution type={kind}", "normal instead")
    return around(mean, sd, low, high)


def _shared_prefix(prefix: Keys, draft: Draft) -> None:
    lengths: dict[str, Any] = {}
    for name, default in (("system_prompt_len", 100), ("question_len", 50), ("output_len", 50)):
        value = prefix.get(name)
        if isinstance(value, dict):
            lengths[name] = _length(Keys(value, f"inference-perf {name}"), draft)
        else:
            lengths[name] = default if value is None else int(value)
    for name, key in (
        ("question_distribution", "question_len"),
        ("output_distribution", "output_len"),
    ):
        if (law := prefix.get(name)) is not None:
            lengths[key] = _length(Keys(law, f"inference-perf {name}"), draft)
    tokens = lengths["system_prompt_len"]
    if isinstance(tokens, dict):
        draft.add_missing("inference-perf system_prompt_len", "a shared prefix has one length")
        tokens = round(float(tokens["mean"] if "mean" in tokens else tokens["max"]))
    groups = prefix.get("num_unique_system_prompts", "num_groups")
    prefix.get("num_users_per_system_prompt", "num_prompts_per_group")
    draft.requests.update(
        input_tokens=lengths["question_len"],
        output_tokens=lengths["output_len"],
        shared_prefix={"tokens": tokens, "groups": int(groups or 10)},
    )
    draft.add_left(prefix)


def _load(load: Keys, draft: Draft) -> None:
    kind = load.text("type") or "constant"
    stages = load.get("stages") or []
    interval_s = load.number("interval")
    interval_s = 1.0 if interval_s is None else interval_s
    seed = load.number("base_seed")
    draft.seed = None if seed is None else int(seed)
    for key in _IGNORED_LOAD:
        load.get(key)
    if (timeout_s := load.number("request_timeout")) is not None:
        draft.limits["timeout"] = write_duration(timeout_s)
    sweep = load.get("sweep")
    if kind == "concurrent":
        _set_streams(stages, draft)
    elif kind == "trace_replay":
        _set_replay(load.nested("trace"), draft)
    elif kind not in ("constant", "poisson"):
        raise UsageError(f"inference-perf load type={kind}: no equivalent is known")
    elif sweep is not None:
        draft.arrivals = {"kind": "poisson", "rate": rate_text(1.0)}
        draft.verb, draft.slo = "capacity", ["ttft <= 1s"]
        draft.notes.append(
            "a sweep finds saturation, slobench capacity the highest rate that meets an SLO;"
            " replace ttft <= 1s by your SLO"
        )
        draft.add_missing(f"inference-perf load sweep={sweep}", "slobench chooses the rates")
    else:
        _set_stages(stages, interval_s, kind, draft)
    draft.add_left(load)


def _set_stages(stages: list[JsonObject], interval_s: float, kind: str, draft: Draft) -> None:
    if not stages:
        raise UsageError("inference-perf load: expected stages or sweep")
    steps = [Keys(stage, "inference-perf stage") for stage in stages]
    levels = [(step.number("rate") or 0.0, step.number("duration") or 0.0) for step in steps]
    for step in steps:
        draft.add_left(step)
    if len(levels) == 1:
        draft.arrivals = {"kind": "poisson", "rate": rate_text(levels[0][0])}
        draft.measure_s = levels[0][1]
    else:
        parts = [{"rate": rate_text(rate), "for": write_duration(s)} for rate, s in levels]
        pause = [{"rate": "0/s", "for": write_duration(interval_s)}] if interval_s else []
        apart = [level for part in parts for level in (*pause, part)]
        draft.arrivals = {"kind": "steps", "levels": apart[len(pause) :]}
        draft.measure_s = sum(s for _, s in levels) + interval_s * (len(levels) - 1)
        draft.notes.append("the stages are one run; slobench sweep makes a run of each rate")
    if kind == "constant":
        draft.notes.append(
            "inference-perf's constant load has exponential gaps, so it is poisson in slobench"
        )


def _set_streams(stages: list[JsonObject], draft: Draft) -> None:
    if not stages:
        raise UsageError("inference-perf load type=concurrent: expected stages")
    steps = [Keys(stage, "inference-perf stage") for stage in stages]
    users = [int(step.number("concurrency_level") or 1) for step in steps]
    n_requests = [step.number("num_requests") for step in steps]
    for step in steps:
        draft.add_left(step)
    draft.set_closed_loop(users[0])
    if len(users) > 1:
        draft.set_sweep("arrivals.users", list(map(str, users)))
    draft.set_window(None, n_requests[0], 0.0)
    for n, number in zip(users[1:], n_requests[1:], strict=True):
        if number is not None and number != n_requests[0]:
            draft.add_missing(
                f"inference-perf stage concurrency_level={n} num_requests={number:g}",
                "every run of a sweep has the requests of the first stage",
            )


def _set_replay(trace: Keys, draft: Draft) -> None:
    path = trace.text("file")
    if not path:
        raise UsageError("inference-perf load type=trace_replay: expected trace.file")
    name = trace.text("format") or "AzurePublicDataset"
    draft.arrivals = {"kind": "trace", "path": path, "format": _TRACE_FORMATS.get(name, "auto")}
    draft.add_left(trace)
