"""Translation of `guidellm benchmark` (to 0.7) and `guidellm run` (from 0.8)."""

from __future__ import annotations

import json

from loadgen.errors import UsageError
from loadgen.manifest.json_section import JsonObject
from loadgen.translate.draft import Draft, Flags, around, rate_text

_IGNORED = """
    output output-path output-dir outputs output-extras display-scheduler-stats
    disable-console-outputs disable-console-interactive disable-progress processor processor-args
    tokenizer backend-type request-type cooldown cooldown-percent data-sampler data-args
"""


def translate(words: list[str]) -> Draft:
    """The draft for the words after `guidellm`, without the verb."""
    flags, draft = Flags(words), Draft("guidellm")
    backend = _keys(flags.text("backend") or "")
    draft.url = flags.text("target") or str(backend.get("target") or draft.url)
    draft.model = flags.text("model") or str(backend.get("model") or "")
    request_format = str(backend.get("request_format"))
    if "completions" in request_format and "chat" not in request_format:
        draft.api = "completions"
    draft.seed = flags.count("random-seed", "seed")
    _lengths(_keys(flags.text("data") or ""), draft)
    profile = _keys(flags.text("profile", "rate-type") or "sweep", bare="kind")
    rates = flags.texts("rate") or []
    rates += [str(profile[key]) for key in ("rate", "streams") if key in profile]
    rates = [rate for word in rates for rate in word.strip("[]").split(",")]
    constraint = _keys(flags.text("constraint") or "")
    seconds = flags.number("max-seconds")
    n_requests = flags.number("max-requests")
    if constraint.get("kind") == "max_duration":
        seconds = float(constraint["seconds"])
    elif constraint.get("kind") in ("max_requests", "max_number"):
        n_requests = float(constraint.get("count") or constraint.get("requests") or 0) or None
    _arrivals(str(profile.get("kind")), rates, draft)
    rate = max(map(float, rates)) if rates and draft.arrivals["kind"] != "users" else 0.0
    draft.set_duration(seconds, n_requests, rate)
    if warmup := flags.text("warmup", "warmup-percent"):
        draft.add_missing(
            f"--warmup {warmup}", "a share of the run in guidellm; set phases.warmup to a time"
        )
    return draft.finish(flags, _IGNORED)


def _keys(text: str, bare: str = "") -> JsonObject:
    """`a=1,b=2` or a JSON object as a mapping; a single word is the value of the key `bare`."""
    if text.startswith("{"):
        try:
            keys: JsonObject = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"{text}: is not JSON ({error.msg})") from None
        return keys
    pairs = [part.partition("=") for part in text.split(",") if part]
    if len(pairs) == 1 and not pairs[0][1]:
        return {bare or "source": text}
    return {key.strip(): value.strip() for key, _, value in pairs}


def _lengths(data: JsonObject, draft: Draft) -> None:
    if "prompt_tokens" not in data or "output_tokens" not in data:
        source = data.get("source") or data or "(none)"
        draft.add_missing(
            f"--data {source}",
            "only prompt_tokens=…,output_tokens=… is translated; 256 and 128 tokens instead",
        )
        data = {"prompt_tokens": 256, "output_tokens": 128, **data}
    for key, word in (("input_tokens", "prompt_tokens"), ("output_tokens", "output_tokens")):
        sd, low, high = (
            float(data[name]) if data.get(name) is not None else None
            for name in (f"{word}_stdev", f"{word}_min", f"{word}_max")
        )
        draft.requests[key] = around(float(data[word]), sd or 0.0, low, high)
    if data.get("prefix_tokens"):
        draft.requests["shared_prefix"] = {"tokens": int(data["prefix_tokens"])}
    if int(data.get("turns") or 1) > 1:
        draft.session = {"turns": int(data["turns"])}


def _arrivals(profile: str, rates: list[str], draft: Draft) -> None:
    if profile == "sweep":
        draft.arrivals = {"kind": "poisson", "rate": rate_text(1.0)}
        draft.verb, draft.slo = "capacity", ["ttft <= 1s"]
        draft.notes.append(
            "a sweep finds the highest throughput, slobench capacity the highest rate that meets an"
            " SLO; replace ttft <= 1s by your SLO"
        )
        return
    if profile == "throughput":
        raise UsageError(
            "--profile throughput keeps as many requests in flight as it can: choose how many"
            " (--profile concurrent --rate 64) and translate that"
        )
    if profile == "synchronous":
        draft.set_closed_loop(1)
        return
    if not rates:
        raise UsageError(f"--profile {profile} needs --rate")
    if profile == "concurrent":
        users = [str(round(float(rate))) for rate in rates]
        draft.set_closed_loop(int(users[0]))
        if len(users) > 1:
            draft.set_sweep("arrivals.users", users)
    elif profile in ("poisson", "constant", "async"):
        kind = "constant" if profile == "async" else profile
        texts = [rate_text(float(rate)) for rate in rates]
        draft.arrivals = {"kind": kind, "rate": texts[0]}
        if len(texts) > 1:
            draft.set_sweep("arrivals.rate", texts)
        if kind == "constant":
            draft.notes.append("constant arrivals are equally spaced in slobench")
    else:
        raise UsageError(f"--profile {profile}: no equivalent is known")
