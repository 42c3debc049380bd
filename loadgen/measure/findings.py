"""Findings: a plain sentence for each fact that a reader should notice although no check fails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.measure.answers import other_model, same_prompts, same_text
from loadgen.measure.attainment import (
    MeasuredWindow,
    came_due,
    start_rows,
    unfinished_rows,
    warmup_rows,
    withdrawn_rows,
)
from loadgen.measure.catalog import METRICS, NEEDS_STREAM
from loadgen.measure.cause import dropped_text
from loadgen.measure.closed_loop import ClosedLoop
from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.reasoning import reasoning, without_answer
from loadgen.measure.server_load import Backend, pinned
from loadgen.measure.slo import Slo
from loadgen.measure.stimulus import Stimulus, altered_arrivals
from loadgen.measure.summary import ValidityCheck
from loadgen.measure.truncated import failed_midway, truncated_text
from loadgen.measure.unmeasured import one_piece
from loadgen.measure.wording import format_count, format_number, format_value
from loadgen.records import AFTER_DONE, Run, Status, TokenSource

NO_LIMITS = (
    "No per-request limit was given, so goodput counts every successful request, and there is no "
    "attainment."
)


def findings(
    run: Run,
    columns: PerRequest,
    due: Mask,
    window: MeasuredWindow,
    slos: Sequence[Slo],
    checks: Sequence[ValidityCheck],
    sent: Stimulus,
    addresses: Sequence[Backend],
    loop: ClosedLoop | None = None,
) -> list[str]:
    """All findings that apply, the most consequential first."""
    of_answers = (
        _other_model(run, due),
        _same_text(run, columns, due),
        _same_prompts(run, due),
    )
    failed = [
        check
        for check in checks
        if check.ok is False and not check.is_gate
        if check.name != "load" or run.manifest.end_kind != "silent"  # no queue: a frozen server
    ]
    failed.sort(key=lambda check: check.name not in ("cache", "input lengths"))
    failed_checks = [f"{check.name.capitalize()}: {check.detail}." for check in failed]
    sentences = (
        _server_ended(run),
        _start_up(loop),
        _open_rate(loop),
        _lock_step(loop),
        _shortened(run, window),
        _too_few(run),
        _unfinished(run, due),
        _dropped(run, due),
        _truncated(run, due),
        _failed_midway(run, due),
        _withdrawn(run),
        _not_due(run, due),
        _below_template(run, due),
        _token_counts(columns, run, due),
        _distrusted(columns, run, due),
        _uncounted(columns, run, due),
        _chunks(columns, run, due),
        _hidden_reasoning(columns, run, due),
        _only_reasoning(columns, run, due),
        _one_piece(columns, due),
        _blocks(columns),
        _empty_answers(columns, due),
        _unknown_events(run, due),
        _dropped_connections(run, due),
        altered_arrivals(sent),
        pinned(run, addresses),
        _disk_writes(run),
        _goodput_without_limits(slos),
    )
    return [text for text in (origin_note(run), *of_answers, *failed_checks, *sentences) if text]


def origin_note(run: Run) -> str:
    """What the file of another tool leaves out, the first thing in a sentence of its own; "" for a
    run of slobench."""
    origin = run.manifest.imported
    if origin is None:
        return ""
    first, *rest = origin.missing
    also = f" Also: {'; '.join(rest)}." if rest else ""
    return f"Measured by {origin.tool_text}, whose file has {first}.{also}"


def _start_up(loop: ClosedLoop | None) -> str:
    """A closed loop whose users had hardly begun."""
    if loop is None or not loop.is_start_up:
        return ""
    return (
        f"Mostly start-up: the {format_count(loop.users)} users begin together, and too few "
        f"requests followed their first answers; {loop.needs_text}. All requests are counted, so "
        "that the figures describe the start."
    )


def _open_rate(loop: ClosedLoop | None) -> str:
    """A closed loop that is too short for an interval of its rate."""
    if loop is None or loop.is_start_up or loop.requests_needed is None or loop.users == 1:
        return ""
    return (
        "The rate has no interval, because the run is too short after the start of its users: "
        f"{loop.needs_text}."
    )


def _lock_step(loop: ClosedLoop | None) -> str:
    """Users of a closed loop that send together."""
    if loop is None or not loop.is_in_lock_step:
        return ""
    return (
        f"The {format_count(loop.users)} users send in lock-step, because their answers take "
        "equally long: latencies hold for such waves only; vary lengths or think times."
    )


def _server_ended(run: Run) -> str:
    """The server that slobench started ended before the run did."""
    ended_s = run.manifest.server_ended_s
    if ended_s is None:
        return ""
    return (
        f"The server under test ended by itself {format_value(ended_s, 's')} after the start of "
        "the run; see its output in logs/."
    )


def _shortened(run: Run, window: MeasuredWindow) -> str:
    planned_s = run.manifest.window.measure_s
    length_s = window.end_s - run.manifest.window.warmup_s
    if length_s >= planned_s:
        return ""
    return (
        f"The measured window is {format_value(length_s, 's')} long, not "
        f"{format_value(planned_s, 's')} as planned."
    )


def _too_few(run: Run) -> str:
    """Fewer requests than the window was to have, because the longest time for them was over."""
    wanted, n = run.manifest.window.requests, _released(run)
    if wanted is None or n >= wanted or run.manifest.ended != "completed":
        return ""
    return (
        f"{format_count(n)} of the {format_count(wanted)} requests of phases.requests were sent in "
        f"{format_value(run.manifest.window.measure_s, 's')}, the longest time for them; "
        "phases.at_most sets it."
    )


def _released(run: Run) -> int:
    """The requests that came due after the warm-up, the start of a closed loop included."""
    return int(np.count_nonzero(came_due(run) | start_rows(run)))


def unfinished_text(run: Run, n: int, n_due: int) -> str:
    """`12 of 300 requests had not finished 30 s after the last was sent`, with the planned drain;
    without it for a run that ended early, whose drain was shorter."""
    text = f"{format_count(n)} of {format_count(n_due)} requests had not finished"
    if run.manifest.ended != "completed":
        return f"{text} when the run ended"
    return f"{text} {format_value(run.manifest.window.drain_s, 's')} after the last was sent"


def _unfinished(run: Run, due: Mask) -> str:
    """Requests that the end of the drain cancelled."""
    n = int(np.count_nonzero(unfinished_rows(run)))
    if not n:
        return ""
    return (
        f"{unfinished_text(run, n, int(np.count_nonzero(due)))}. They count as misses, not as "
        "failures; phases.drain sets how long they have."
    )


def _dropped(run: Run, due: Mask) -> str:
    """Requests that were due while `limits.max_concurrency` requests were in flight."""
    return dropped_text(run, due)


def _truncated(run: Run, due: Mask) -> str:
    """Answers that were short of an exact length."""
    return truncated_text(run, due)


def _failed_midway(run: Run, due: Mask) -> str:
    """Errors of the server after some tokens."""
    return failed_midway(run, due)


def _withdrawn(run: Run) -> str:
    """Requests that the scenario cancels on purpose, and whether that happened in time."""
    rows = run.request_rows[withdrawn_rows(run)]
    if not len(rows):
        return ""
    n_cancelled = int(np.count_nonzero(np.isin(rows["error_id"], run.names.on_purpose)))
    n_ended = int(np.count_nonzero(rows["status"] == Status.ok))
    n_other = len(rows) - n_cancelled - n_ended
    return (
        f"{format_count(len(rows))} requests were to be cancelled on purpose: "
        f"{format_count(n_cancelled)} were cancelled, {format_count(n_ended)} succeeded before "
        f"that, {format_count(n_other)} ended in another way. None of them counts for an SLO."
    )


def _not_due(run: Run, due: Mask) -> str:
    """Requests of the window that never became due."""
    if (wanted := run.manifest.window.requests) and _released(run) >= wanted:
        return ""  # more sessions were planned than the window needed
    closed = [traffic.is_closed_loop for traffic in run.manifest.classes.values()]
    again = np.isin(run.schedule_rows["class_id"], np.flatnonzero(closed))
    others = ~(warmup_rows(run) | start_rows(run) | due | withdrawn_rows(run))
    n = int(np.count_nonzero(others & ~again))  # closed loops plan more requests than they send
    if not n:
        return ""
    return (
        f"{format_count(n)} planned requests of the measured window were not sent, because the "
        "request before them failed or did not finish, or because the run had ended."
    )


def _below_template(run: Run, due: Mask) -> str:
    """Prompts planned shorter than a single character makes them, by the target's calibration."""
    fit = run.manifest.target.prompt_fit
    if fit is None:
        return ""
    overhead_tokens, tokens_per_char = fit
    planned = run.schedule_rows["input_tokens"]
    n = int(np.count_nonzero(due & (planned < overhead_tokens + tokens_per_char / 2)))
    if not n:
        return ""
    least_tokens = format_number(overhead_tokens + tokens_per_char)
    return (
        f"{format_count(n)} requests were planned with fewer tokens than the chat template alone "
        f"needs (at least {least_tokens}), so the server counts more tokens than planned."
    )


def _other_model(run: Run, due: Mask) -> str:
    """Answers that state another model than requested."""
    return other_model(run, due)


def _same_prompts(run: Run, due: Mask) -> str:
    """Recorded prompts that were sent several times."""
    return same_prompts(run, due)


def _same_text(run: Run, columns: PerRequest, due: Mask) -> str:
    """Answers with the same text to different prompts."""
    return same_text(run, columns, due)


def _token_counts(columns: PerRequest, run: Run, due: Mask) -> str:
    """The usage that the server states, compared with its own counts per chunk."""
    gaps = columns.gaps
    if not gaps.is_counted:
        return ""
    rows = run.request_rows
    streamed = np.zeros(len(rows), np.int64)
    streamed[gaps.rows] = np.add.reduceat(gaps.tokens, gaps.starts, dtype=np.int64)
    streamed += columns.first_tokens
    by_usage = due & columns.is_ok & (rows["token_source"] == TokenSource.usage)
    differ = by_usage & (rows["first_chunk_tokens"] > 0) & (streamed != columns.streamed_tokens)
    n = int(np.count_nonzero(differ))
    if not n:
        return ""
    return (
        f"In {format_count(n)} of {format_count(int(by_usage.sum()))} answers the token counts per "
        "chunk do not add up to the server's usage figure; the usage figure is used."
    )


_OF_STREAM = tuple(name for name in METRICS if name in NEEDS_STREAM)
_BY_TOKEN = ("tpot_s", "itl_s", "max_itl_s", "e2e_per_token_s")
"""Metrics that depend on the number of tokens of an answer or of its chunks."""


def token_marks(columns: PerRequest, run: Run, due: Mask) -> dict[str, str]:
    """Metric → the reason why its values are doubtful or absent: metrics that depend on token
    counts which the server does not state, or states wrongly, and ITL of blocks."""
    if run.manifest.target.results:
        return {}
    marks = _count_marks(columns, run, due)
    if not columns.is_streamed:
        return dict.fromkeys(_OF_STREAM, "n/a: the answers were requested as a whole")
    if _hidden_reasoning(columns, run, due):
        marks |= dict.fromkeys(("ttft_s", "ttft_from_send_s"), "after reasoning, not streamed")
    n, n_answers = one_piece(columns, due)
    if n and n == n_answers:
        reason = "n/a: every answer came in one piece"
        marks |= dict.fromkeys(("tpot_s", "itl_s", "max_itl_s"), reason)
    elif columns.blocks is not None:
        marks |= dict.fromkeys(("itl_s", "max_itl_s"), columns.blocks.reason)
    return marks


def _count_marks(columns: PerRequest, run: Run, due: Mask) -> dict[str, str]:
    rows = run.request_rows
    answered = due & columns.is_ok & columns.has_token
    n = int(np.count_nonzero(answered))
    n_wrong = int(np.count_nonzero(answered & (rows["token_source"] == TokenSource.distrusted)))
    n_uncounted = int(np.count_nonzero(answered & (rows["token_source"] == TokenSource.chunks)))
    per_chunk = "each chunk counts as 1 token, which is too long if chunks hold several"
    if n_wrong:
        of = f"{format_count(n_wrong)} of {format_count(n)} answers"
        return dict.fromkeys(_BY_TOKEN, f"the server's usage cannot be true in {of}: {per_chunk}")
    if n_uncounted:
        of = f"{format_count(n_uncounted)} of {format_count(n)} answers have no usage"
        return dict.fromkeys(_BY_TOKEN, f"{of}: {per_chunk}")
    if _chunks(columns, run, due):
        return {
            "tpot_s": "the tokens of the first chunk are estimated from its share of the text",
            "itl_s": "per chunk, because the server counts no tokens per chunk",
            "max_itl_s": "per chunk, because the server counts no tokens per chunk",
        }
    return {}


def _distrusted(columns: PerRequest, run: Run, due: Mask) -> str:
    answered = due & columns.is_ok & columns.has_token
    n = int(
        np.count_nonzero(answered & (run.request_rows["token_source"] == TokenSource.distrusted))
    )
    if not n:
        return ""
    return (
        f"The server's usage cannot be true in {format_count(n)} of "
        f"{format_count(int(answered.sum()))} answers: it states fewer tokens than chunks came, or "
        "more than their text can hold. Their tokens are counted as 1 per chunk."
    )


def _uncounted(columns: PerRequest, run: Run, due: Mask) -> str:
    answered = due & columns.is_ok & columns.has_token & (run.request_rows["results"] == 0)
    known = (TokenSource.usage, TokenSource.distrusted)
    uncounted = answered & ~np.isin(run.request_rows["token_source"], known)
    n = int(np.count_nonzero(uncounted))
    if not n:
        return ""
    return (
        f"{format_count(n)} of {format_count(int(answered.sum()))} answers came without the "
        "server's usage figure; the load generator counted their tokens, one per chunk where it "
        "had no better count."
    )


def _chunks(columns: PerRequest, run: Run, due: Mask) -> str:
    """Chunks of several tokens, where the server does not state how many each carries."""
    answered = due & columns.is_ok & (run.request_rows["token_source"] == TokenSource.usage)
    answered &= run.request_rows["chunks"] > 1
    chunks = int(run.request_rows["chunks"][answered].sum())
    tokens = int(columns.streamed_tokens[answered].sum())
    if columns.gaps.is_counted or not chunks or abs(tokens / chunks - 1) <= 0.01:
        return ""
    return (
        f"ITL counts chunks, not tokens: the server sent {format_number(tokens / chunks)} tokens "
        "per chunk on average, and does not state how many each has. TPOT takes the tokens of the "
        "first chunk from its share of the text."
    )


def _hidden_reasoning(columns: PerRequest, run: Run, due: Mask) -> str:
    """Reasoning that the server counts and does not stream."""
    answered = due & columns.is_ok & columns.has_token
    hidden = run.request_rows["hidden_tokens"][answered]
    n = int(np.count_nonzero(hidden))
    if not n:
        return ""
    mean, of_mean = float(hidden.mean()), float(columns.output_tokens[answered].mean())
    return (
        f"{format_count(n)} of {format_count(len(hidden))} answers have reasoning that was not "
        f"streamed: {format_number(mean)} of {format_number(of_mean)} output tokens on average. "
        "TTFT includes it; TPOT and the tokens per second leave it out."
    )


def _only_reasoning(columns: PerRequest, run: Run, due: Mask) -> str:
    """Answers that ended in their reasoning."""
    return without_answer(reasoning(run, columns, due))


def _one_piece(columns: PerRequest, due: Mask) -> str:
    """Answers whose tokens all came at once."""
    n, n_answers = one_piece(columns, due)
    if not n:
        return ""
    return (
        f"{format_count(n)} of {format_count(n_answers)} answers came in one piece (a single event "
        "or read), so that they have no TPOT and no ITL; SLOs on them leave these answers out."
    )


def _blocks(columns: PerRequest) -> str:
    """Streams that are delivered in blocks, and the layer that probably holds them back."""
    found = columns.blocks
    if found is None:
        return ""
    return (
        f"ITL is {found.reason}, {format_value(found.gap_s, 's')} apart at the median. The likely "
        f"layer: {found.layer}. TTFT, TPOT, ICL and max stall are what a user of this route sees; "
        "TTFT waits for the first block."
    )


def _empty_answers(columns: PerRequest, due: Mask) -> str:
    n = int(np.count_nonzero(due & columns.is_ok & ~columns.has_token))
    if not n:
        return ""
    return f"{format_count(n)} answers succeeded without a single token; they count as misses."


def _unknown_events(run: Run, due: Mask) -> str:
    counts = run.request_rows["unknown_events"][due]
    n = int(np.count_nonzero(counts))
    if not n:
        return ""
    return (
        f"{format_count(int(counts.sum()))} events in {format_count(n)} answers are none of the "
        "API's (heartbeats, extensions of a gateway); they were skipped."
    )


def _dropped_connections(run: Run, due: Mask) -> str:
    """Answers that were complete although their connections did not end properly."""
    notes = np.array([text.startswith(AFTER_DONE) for text in run.names.errors])
    rows = run.request_rows[due & (run.request_rows["status"] == Status.ok)]
    noted = rows["error_id"][notes[rows["error_id"]]]
    if not len(noted):
        return ""
    usual = int(np.bincount(noted).argmax())
    return (
        f"{format_count(len(noted))} of {format_count(len(rows))} answers were "
        f"{run.names.errors[usual]}. They count as successful; each cost a connection."
    )


def _disk_writes(run: Run) -> str:
    """Disk writes of the load generator on the machine that it measured with."""
    n_bytes = sum(shard.spilled_bytes for shard in run.instrument.shards)
    if not n_bytes:
        return ""
    megabytes = format_number(n_bytes / 1e6)
    return f"The load generator wrote {megabytes} MB of answers to its disk while measuring."


def _goodput_without_limits(slos: Sequence[Slo]) -> str:
    if any(slo.scope == "request" for slo in slos):
        return ""
    return NO_LIMITS
