"""Findings on answers that cannot be those to the prompts: another model, the same text for all
prompts, the same prompt for all requests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loadgen.measure.per_request import Mask, PerRequest
from loadgen.measure.wording import format_count
from loadgen.records import OTHER_MODEL, Run, Status

LEAST_COMPARED = 10  # answers
_ALIKE_SHARE = 0.95
_LEAST_REQUESTED = 8  # tokens of an answer: shorter answers may well be the same


def other_model(run: Run, due: Mask) -> str:
    """The finding on answers of another model than requested; "" for none."""
    ok = run.request_rows[due & (run.request_rows["status"] == Status.ok)]
    notes = [text.removeprefix(OTHER_MODEL) for text in run.names.errors]
    is_note = np.array([text.startswith(OTHER_MODEL) for text in run.names.errors])
    noted = ok["error_id"][is_note[ok["error_id"]]]
    if not len(noted):
        return ""
    usual = notes[int(np.bincount(noted).argmax())]
    n = f"{format_count(len(noted))} of {format_count(len(ok))}"
    return (
        f"{n} answers state the model '{usual}', not '{run.manifest.target.model}', which was "
        "requested. Unless it is another name of the same model, the numbers are of that model."
    )


def same_prompts(run: Run, due: Mask) -> str:
    """The finding on recorded prompts that were sent again without a salt; "" for none."""
    n_due, n_texts = int(np.count_nonzero(due)), run.manifest.target.recorded_prompts
    if n_texts is None or n_due <= n_texts:
        return ""
    sent = "the same prompt"
    if n_texts > 1:
        sent = f"only {format_count(n_texts)} different prompts"
    return (
        f"The {format_count(n_due)} requests sent {sent} (prompts.salt: none), so that a prefix "
        "cache can answer most of them. The default, salt: run, makes each prompt new."
    )


def same_text(run: Run, columns: PerRequest, due: Mask) -> str:
    """The finding on answers that have the same text although the prompts differ; "" for none.

    Answers are compared by the CRC-32 of the first 128 bytes of their text. A shorter text depends
    on its length, so answers of equal length are also compared among themselves.
    """
    rows, schedule = run.request_rows, run.schedule_rows
    compared = due & columns.is_ok & (rows["answer_crc32"] > 0)
    compared &= (schedule["output_tokens"] >= _LEAST_REQUESTED) | (rows["results"] > 0)
    if np.count_nonzero(compared) < LEAST_COMPARED or same_prompts(run, due):
        return ""
    texts, lengths = rows["answer_crc32"][compared], columns.output_tokens[compared]
    noun = run.manifest.target.results or "text"
    for n_alike, n in (_alike(texts, np.zeros_like(lengths)), _alike(texts, lengths)):
        if n >= LEAST_COMPARED and n_alike >= _ALIKE_SHARE * n:
            return (
                f"{format_count(n_alike)} of {format_count(n)} answers have the same {noun}, "
                "although their prompts differ: perhaps the server does not compute them (a canned "
                "answer, an error as text, a cache of answers). Check the text of an answer."
            )
    return ""


def why_canned(run: Run, columns: PerRequest, due: Mask) -> str:
    """The reason why a run cannot be met although its SLOs are: `same_text` of answers of at least
    8 tokens, since a shorter one may be the right answer to many prompts (a class, yes or no). ""
    for other runs, and for the bundled engine, which computes no text with simulated steps."""
    if run.manifest.target.is_bundled:
        return ""
    has_results = run.request_rows["results"] > 0
    return same_text(
        run, columns, due & (has_results | (columns.output_tokens >= _LEAST_REQUESTED))
    )


def _alike(texts: NDArray[np.uint32], lengths: NDArray[np.int64]) -> tuple[int, int]:
    """(answers with the most frequent text of their length, answers with a length that others
    have)."""
    keys, counts = np.unique(lengths.astype(np.uint64) << 32 | texts, return_counts=True)
    starts = np.unique(keys >> 32, return_index=True)[1]
    most, sizes = np.maximum.reduceat(counts, starts), np.add.reduceat(counts, starts)
    return int(most[sizes > 1].sum()), int(sizes[sizes > 1].sum())
