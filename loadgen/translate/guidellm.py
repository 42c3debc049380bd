"""Translation of `guidellm benchmark` (to 0.7) and `guidellm run` (from 0.8)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.translate.draft import Draft, Flags, Keys, around, rate_text
from loadgen.units import write_duration
from loadgen.yaml_document import parse_document

_IGNORED = """
    output output-path output-dir outputs output-extras display-scheduler-stats
    disable-console disable-console-outputs disable-console-interactive disable-progress processor
    processor-args tokenizer backend-type label
"""
_CONSTRAINTS = {  # a flag to 0.7: a constraint from 0.8, and its key
    "max-errors": ("max_errors", "count"),
    "max-error-rate": ("max_error_rate", "rate"),
    "max-global-error-rate": ("max_global_error_rate", "rate"),
}
_TRACES = ("trace_synthetic", "mooncake")
_SYNTHETIC = ("prompt_tokens", "output_tokens")
_METRICS = {"ttft_ms": "ttft_from_send", "tpot_ms": "tpot", "e2el_ms": "e2e_from_send"}
_SEARCHES = {
    "sweep": "a sweep finds the highest throughput",
    "goodput": "it finds the highest number of streams",
    "knee": "it finds the number of streams at which latency begins to rise",
}


@dataclass
class _Stop:
    """The limits of a run: seconds, requests, and the shares (below 1) or seconds of a warm-up and
    a cool-down."""

    seconds: float | None = None
    n_requests: float | None = None
    warmup: float = 0.0
    cooldown: float = 0.0


def translate(words: list[str]) -> Draft:
    """The draft for the words after `guidellm`, without the verb."""
    flags, draft = Flags(words, {"-c": "config"}), Draft("guidellm")
    _target(flags, draft)
    seed = flags.text("random-seed", "seed")
    if seed is not None:
        draft.seed = int(Keys(_keys(seed, bare="value"), "--seed").number("value") or 0)
    profile = Keys(_keys(flags.text("profile", "rate-type") or "sweep", bare="kind"), "--profile")
    kind = profile.text("kind")
    _data(flags, draft)
    stop = _Stop(flags.number("max-seconds"), flags.number("max-requests"))
    for text in flags.texts("constraint") or []:
        _constraint(Keys(_keys(text), f"--constraint {text.partition(',')[0]}"), stop, draft)
    for name, (constraint, key) in _CONSTRAINTS.items():
        if (limit := flags.number(name)) is not None:
            _constraint(Keys({"kind": constraint, key: limit}, f"--{name}"), stop, draft)
    if flags.texts("detect-saturation", "over-saturation", "default-over-saturation") is not None:
        _constraint(Keys({"kind": "over_saturation"}, "--detect-saturation"), stop, draft)
    for name in ("warmup", "cooldown"):
        share = flags.text(name, f"{name}-percent")
        value = share if share is not None else profile.get(name)
        setattr(stop, name, _transient(value, name, draft))
    rates = _rates(flags.texts("rate") or [], profile)
    if metrics := flags.text("metrics"):
        _slo(Keys(_keys(metrics), "--metrics"), draft)
    _arrivals(kind, rates, profile, draft)
    draft.add_left(profile)
    _duration(stop, rates, draft)
    return draft.finish(flags, _IGNORED)


def _target(flags: Flags, draft: Draft) -> None:
    backend = Keys(_keys(flags.text("backend") or "", bare="kind"), "--backend")
    if (kind := backend.text("kind") or "openai_http") != "openai_http":
        draft.add_missing(
            f"--backend kind={kind}",
            "slobench measures servers over HTTP: start one (launch: in a target file)",
        )
    draft.url = flags.text("target") or backend.text("target") or draft.url
    draft.model = flags.text("model") or backend.text("model")
    request_format = backend.text("request_format")
    request_format = flags.text("request-type", "request-format") or request_format
    if "completions" in request_format and "chat" not in request_format:
        draft.api = "completions"
    elif request_format and "chat" not in request_format:
        raise UsageError(f"{request_format}: slobench supports chat and completions only")
    if (timeout_s := backend.number("timeout")) is not None:
        draft.limits["timeout"] = write_duration(timeout_s)
    extras = backend.nested("extras")
    for key, value in (extras.get("body") or {}).items():
        draft.add_field(key, value)
    draft.add_left(extras)
    draft.add_left(backend)


def _keys(text: str, bare: str = "") -> JsonObject:
    """`a=1,b.c=2` or a JSON object as a mapping; a single word is the value of the key `bare`.
    `b.c` is the key c of the mapping b, and `d[0].e` that of the first entry of the list d."""
    if text.startswith("{"):
        try:
            keys: JsonObject = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{text}: is not JSON ({error.msg})") from None
        return keys
    pairs = [part.partition("=") for part in re.split(r",(?![^\[]*\])", text) if part]
    if len(pairs) == 1 and not pairs[0][1]:
        return {bare or "source": text}
    keys = {}
    for name, _, value in pairs:
        *parents, last = re.sub(r"\[(\d+)\]", r".\1", name.strip()).split(".")
        place = keys
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise UsageError(f"{text}: {parent} is both a value and a mapping")
        place[last] = parse_document(f"v: {value}", text, UsageError).values["v"]
    return keys


def _rates(words: list[str], profile: Keys) -> list[str]:
    for name in ("rate", "streams"):
        value = profile.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        words = [*words, *map(str, values)]
    return [rate for word in words for rate in word.strip("[]").split(",")]


def _data(flags: Flags, draft: Draft) -> None:
    texts = flags.texts("data") or ["(none)"]
    for text in texts[1:]:
        draft.add_missing(f"--data {text}", "slobench reads a single source of prompts")
    keys = Keys(_keys(texts[0]), "--data")
    kind = keys.text("kind")
    if kind in _TRACES:
        _trace(keys, kind, draft)
    elif kind == "json_file":
        draft.prompts = {"kind": "dataset", "path": keys.text("path")}
        draft.requests["output_tokens"] = 128
        draft.notes.append(
            "the file needs a line of JSON for each prompt, with the key prompt or messages;"
            " answers have 128 tokens unless a line states output_tokens"
        )
    else:
        _lengths(texts[0], keys, draft)
    draft.add_left(keys)


def _trace(keys: Keys, kind: str, draft: Draft) -> None:
    source = keys.get("source", "path")
    path = source.get("path") if isinstance(source, dict) else source
    if not path:
        raise UsageError(f"--data kind={kind}: expected source.path=FILE")
    draft.arrivals = {"kind": "trace", "path": str(path)}
    if kind == "trace_synthetic":
        columns = {
            "time": keys.text("timestamp_column") or "timestamp",
            "input_tokens": keys.text("prompt_tokens_column") or "input_length",
            "output_tokens": keys.text("output_tokens_column") or "output_length",
        }
        session = keys.text("conversation_id_column")
        session_column = {"session": session} if session else {}
        draft.arrivals["format"] = {"kind": "columns", **columns, **session_column}
    if (scale := keys.number("time_scale")) is not None:
        draft.arrivals["time_scale"] = scale


def _lengths(text: str, keys: Keys, draft: Draft) -> None:
    means = [keys.number(word) for word in _SYNTHETIC]
    if None in means:
        keys.get("source", "path")
        draft.add_missing(
            f"--data {text}",
            "only prompt_tokens=…,output_tokens=… is translated; 256 and 128 tokens instead",
        )
        means = [256.0 if means[0] is None else means[0], 128.0 if means[1] is None else means[1]]
    for key, word, mean in zip(("input_tokens", "output_tokens"), _SYNTHETIC, means, strict=True):
        sd, low, high = (keys.number(f"{word}_{name}") for name in ("stdev", "min", "max"))
        draft.requests[key] = _length(float(mean or 0), sd, low, high)
    prefix = keys.number("prefix_tokens")
    groups = keys.number("prefix_count")
    buckets = keys.get("prefix_buckets") or []
    buckets = list(buckets.values()) if isinstance(buckets, dict) else buckets
    if buckets:
        first = Keys(buckets[0], "--data prefix_buckets")
        prefix, groups = first.number("prefix_tokens"), first.number("prefix_count")
        first.get("bucket_weight")
        draft.add_left(first)
        for bucket in buckets[1:]:
            draft.add_missing(f"--data prefix_buckets {bucket}", "only the first is translated")
    if prefix:
        draft.requests["shared_prefix"] = {"tokens": int(prefix), "groups": int(groups or 1)}
    turns = int(keys.number("turns") or 1)
    if turns > 1:
        draft.session = {"turns": turns}
        if (delay_s := keys.number("delay")) is not None:
            draft.session["think"] = write_duration(delay_s)


def _length(mean: float, sd: float | None, low: float | None, high: float | None) -> Any:
    """guidellm draws uniformly between the bounds if it has bounds but no deviation."""
    if not sd and low is not None and high is not None and low < high:
        return {"kind": "uniform", "min": round(low), "max": round(high)}
    return around(mean, sd or 0.0, low, high)


def _constraint(keys: Keys, stop: _Stop, draft: Draft) -> None:
    kind = keys.text("kind")
    if kind == "max_duration":
        stop.seconds = keys.number("seconds")
    elif kind in ("max_requests", "max_number", "min_requests"):
        stop.n_requests = keys.number("count", "requests")
    elif kind == "max_errors":
        draft.add_missing(
            f"--constraint kind=max_errors,count={keys.number('count'):g}",
            "slobench stops at a share of failures, not at a count: stop_when.error_rate",
        )
    elif kind in ("max_error_rate", "max_global_error_rate"):
        draft.stop_when["error_rate"] = keys.number("rate")
        draft.notes.append(
            f"{kind}: slobench looks at the failures of the last 20 s (stop_when.over)"
        )
        n_least = keys.number("window", "minimum")
        if n_least is not None:
            draft.add_missing(
                f"--constraint {kind}: {n_least:g} requests", "set stop_when.over to a time"
            )
    elif kind == "over_saturation" and keys.text("mode") in ("", "enforce"):
        least_s = keys.number("min_seconds")
        draft.stop_when["saturated"] = write_duration(30.0 if least_s is None else least_s)
        draft.notes.append(
            "over_saturation: slobench stops if requests pile up for this long, by a test of its"
            " own (stop_when.saturated)"
        )
    else:
        draft.add_missing(
            f"--constraint kind={kind}", "slobench reports saturation and does not stop for this"
        )
    draft.add_left(keys)


def _transient(value: Any, name: str, draft: Draft) -> float:
    """A warm-up or a cool-down: a share of the run if below 1, else seconds."""
    if value is None:
        return 0.0
    if isinstance(value, str) and value.startswith("{"):
        value = _keys(value)
    if isinstance(value, dict):
        keys = Keys(value, f"--profile {name}")
        if keys.text("mode") == "requests":
            draft.add_missing(f"--profile {name}={value}", f"set phases.{name} to a time")
            return 0.0
        value = keys.number("percent", "value")
        draft.add_left(keys)
    return float(value or 0.0)


def _slo(keys: Keys, draft: Draft) -> None:
    keys.get("kind")
    slo = keys.nested("slo")
    for key, metric in _METRICS.items():
        if (limit_ms := slo.number(key)) is not None:
            draft.add_slo(metric, str(limit_ms))
    draft.add_left(slo)
    draft.add_left(keys)


def _duration(stop: _Stop, rates: list[str], draft: Draft) -> None:
    """The measured window: the run without its warm-up and cool-down."""
    is_open = draft.arrivals["kind"] not in ("users", "trace")
    rate = max(map(float, rates)) if rates and is_open else 0.0
    is_whole = not (stop.warmup or stop.cooldown)
    set_window = draft.set_window if is_whole else draft.set_duration
    set_window(stop.seconds, stop.n_requests, rate)
    shares = {"warmup": stop.warmup, "cooldown": stop.cooldown}
    if draft.measure_s is None:
        for name, share in shares.items():
            if 0 < share < 1:
                draft.add_missing(f"--{name} {share:g}", "a share of a run without a duration")
                shares[name] = 0.0
    total_s = draft.measure_s or 0.0
    seconds = {name: share * total_s if share < 1 else share for name, share in shares.items()}
    draft.warmup_s = seconds["warmup"]
    if draft.measure_s is not None:
        draft.measure_s = total_s - seconds["warmup"] - seconds["cooldown"]
        if draft.measure_s <= 0:
            raise UsageError("warm-up and cool-down are as long as the run")
    if seconds["cooldown"]:
        draft.add_missing(
            f"--cooldown {stop.cooldown:g}",
            "requests count by their scheduled send time, so the end of the window needs no"
            " cool-down; phases.measure is shorter by it",
        )


def _arrivals(kind: str, rates: list[str], profile: Keys, draft: Draft) -> None:
    if kind == "replay":
        _set_replay(rates, profile, draft)
        return
    if draft.arrivals:
        draft.notes.append("the trace's own times replace the profile's arrivals")
        draft.add_missing(f"--profile {kind}", "a trace is replayed at its own times")
        profile.get("max_concurrency")
        return
    streams = profile.number("max_concurrency")
    rampup_s = profile.number("rampup_duration") or 0.0
    if kind in _SEARCHES:
        _set_search(kind, profile, draft)
        return
    if kind == "throughput" and streams is None:
        raise UsageError(
            "--profile throughput keeps as many requests in flight as it can: choose how many"
            " (--profile concurrent --rate 64) and translate that"
        )
    if kind in ("throughput", "synchronous"):
        draft.set_closed_loop(int(streams or 1))
    elif not rates:
        raise UsageError(f"--profile {kind} needs --rate")
    elif kind == "concurrent":
        users = [str(round(float(rate))) for rate in rates]
        draft.set_closed_loop(int(users[0]))
        if len(users) > 1:
            draft.set_sweep("arrivals.users", users)
    elif kind in ("poisson", "constant", "async"):
        _set_rates("constant" if kind == "async" else kind, rates, draft)
        if streams is not None:
            draft.limit_in_flight(
                int(streams), "at max_concurrency guidellm sends later, and so does slobench"
            )
    else:
        raise UsageError(f"--profile {kind}: no equivalent is known")
    if rampup_s and draft.arrivals["kind"] == "users":
        draft.arrivals["ramp_up"] = write_duration(rampup_s)
    elif rampup_s:
        draft.add_missing(f"--profile rampup_duration={rampup_s:g}", "see arrivals: {kind: ramp}")


def _set_rates(kind: str, rates: list[str], draft: Draft) -> None:
    texts = [rate_text(float(rate)) for rate in rates]
    draft.arrivals = {"kind": kind, "rate": texts[0]}
    if len(texts) > 1:
        draft.set_sweep("arrivals.rate", texts)
    if kind == "constant":
        draft.notes.append("constant arrivals are equally spaced in slobench")


def _set_replay(rates: list[str], profile: Keys, draft: Draft) -> None:
    if not draft.arrivals:
        raise UsageError("--profile replay needs --data kind=trace_synthetic,source.path=FILE")
    scale = profile.number("time_scale") or (float(rates[0]) if rates else None)
    if scale is not None:
        draft.arrivals["time_scale"] = scale * draft.arrivals.get("time_scale", 1.0)
    if profile.text("schedule_turn") != "timestamp":
        draft.notes.append(
            "later turns of a conversation: guidellm keeps the recorded idle gaps, slobench the"
            " recorded times"
        )


def _set_search(kind: str, profile: Keys, draft: Draft) -> None:
    draft.arrivals = {"kind": "poisson", "rate": rate_text(1.0)}
    draft.verb = "capacity"
    example = ""
    if not draft.slo:
        draft.slo, example = ["ttft <= 1s"], "; replace ttft <= 1s by your SLO"
    attainment = profile.number("target_attainment")
    if attainment is not None:
        draft.slo.append(f"attainment >= {100 * attainment:g}%")
    draft.notes.append(
        f"{_SEARCHES[kind]}, slobench capacity the highest rate that meets an SLO{example}"
    )
