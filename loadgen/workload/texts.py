"""Sources of prompt text: common words, a text file, or recorded prompts."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import ConfigDict, Field

from loadgen.errors import ScenarioError
from loadgen.registry import Plugin, Registry, bare_word
from loadgen.system.whole_file import read_regular
from loadgen.workload.client_tokenizer import TokenCounter, load_tokenizer
from loadgen.workload.dataset_file import read_records
from loadgen.workload.dataset_forms import (
    LeftOut,
    RecordedPrompt,
    keys_found,
    nearest_form,
    read_prompts,
)
from loadgen.workload.vocabulary import WORDS

CORPUS_WORDS = 60_000
_CORPUS_CHARS = 1_000_000
_MOST_BYTES = 2 << 30


class PromptKind(Plugin, ABC):
    """A source of text.

    `salt`: with `run` every run sends different text, so that a second run misses the first run's
    prefix cache; with `none` every run sends the same text. `tokenizer`: count tokens on the
    client, with `bytes` or the tokenizer of a local model directory, instead of by a fit to the
    server's own counts.
    """

    model_config = ConfigDict(strict=True)
    salt: Literal["run", "none"] = "run"
    tokenizer: Annotated[str, Field(min_length=1)] | None = None

    @property
    def is_common_words(self) -> bool:
        """Whether other common words may replace the text."""
        return False

    @property
    def gives_lengths(self) -> bool:
        """Whether the prompts have lengths of their own, so that `requests` may leave them out."""
        return False

    @abstractmethod
    def corpus(self, rng: np.random.Generator) -> str:
        """A long text; prompts are slices of it."""

    def recorded(self) -> Sequence[RecordedPrompt]:
        """The prompts to send unchanged; empty for kinds whose prompts are slices of the corpus."""
        return ()

    def notes(self) -> tuple[str, ...]:
        """What was left out on reading a file of prompts."""
        return ()

    def load_tokenizer(self) -> TokenCounter | None:
        return None if self.tokenizer is None else load_tokenizer(self.tokenizer)


PROMPTS: Registry[PromptKind] = Registry("slobench.prompts", "source of prompts", bare_word)


class Synthetic(PromptKind):
    """Common English words in random order: in every tokenizer's vocabulary and in no cache."""

    kind = "synthetic"

    @property
    def is_common_words(self) -> bool:
        return True

    def corpus(self, rng: np.random.Generator) -> str:
        return " ".join(map(WORDS.__getitem__, rng.integers(0, len(WORDS), CORPUS_WORDS).tolist()))


class TextFile(PromptKind):
    """Slices of a local text file in your own language and style; white space becomes a single
    blank."""

    kind = "text"
    path: str

    def corpus(self, rng: np.random.Generator) -> str:
        label = f"prompts.path: {self.path}"
        text = re.sub(r"\s+", " ", read_text(self.path, label)).strip()
        if len(text) < 100:
            raise ScenarioError(f"{label}: only {len(text)} characters of text")
        return text


class RecordedPrompts(PromptKind):
    """Base of the kinds that send the prompts of a file. A recorded answer is not sent; its length,
    counted with `tokenizer` or by `answer_chars_per_token`, is that of the answer to request where
    the file states no number."""

    path: str
    answer_chars_per_token: Annotated[float, Field(gt=0)] = 4.0
    needs_answer: ClassVar[bool] = False

    @property
    def form(self) -> str:
        """The form of the file's records, of `dataset_forms.FORMATS`."""
        return "auto"

    @property
    def gives_lengths(self) -> bool:
        return True

    def recorded(self) -> Sequence[RecordedPrompt]:
        return self._read[0]

    def notes(self) -> tuple[str, ...]:
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[list[RecordedPrompt], tuple[str, ...]]:
        """The prompts, and the records that were left out, by reason."""
        label, tokenizer = f"prompts.path: {self.path}", self.load_tokenizer()
        prompts: list[RecordedPrompt] = []
        left_out = Counter[str]()
        first_lines: dict[str, int] = {}
        refusal, n_records = ": has no prompt to send", 0
        is_plain = self.form == "lines"
        for line, record in read_records(self.path, label, is_plain=is_plain):
            n_records += 1
            place = f"{self.path}:{line}"
            try:
                found = read_prompts(
                    record, f"prompts.path: {place}", self.form, needs_answer=self.needs_answer
                )
            except LeftOut as reason:
                left_out[str(reason)] += 1
                if str(reason) not in first_lines:
                    first_lines[str(reason)] = line
                if n_records == 1:
                    keys = f"keys found: {keys_found(record)}; {nearest_form(record)}"
                    refusal = f":{line}: {reason}; {keys}"
                continue
            prompts += [self._counted(replace(prompt, place=place), tokenizer) for prompt in found]
        if not prompts:
            raise ScenarioError(f"{label}{refusal}")
        reasons = ", ".join(
            f"{n} with {reason} (first in line {first_lines[reason]})"
            for reason, n in left_out.most_common()
        )
        notes = (f"{left_out.total()} of {n_records} records left out: {reasons}",)
        return prompts, notes if left_out else ()

    def _counted(self, prompt: RecordedPrompt, tokenizer: TokenCounter | None) -> RecordedPrompt:
        """The prompt with the length of its recorded answer, unless it states a number."""
        if prompt.output_tokens is not None or not prompt.answer:
            return prompt
        n = len(prompt.answer) / self.answer_chars_per_token
        n_tokens = round(n) if tokenizer is None else tokenizer.count(prompt.answer)
        return replace(prompt, output_tokens=max(1, n_tokens), answer="")

    def corpus(self, rng: np.random.Generator) -> str:
        prompts = (" ".join(text for _, text in p.messages) for p in self.recorded()[:10_000])
        return " ".join(" ".join(prompt.split()) for prompt in prompts)[:_CORPUS_CHARS]


class Dataset(RecordedPrompts):
    """The prompts of a file in the form of any known tool (docs/scenarios.md), in JSON lines, a
    JSON array, CSV or Parquet; `format` names the form where it is not to be found by the keys.
    Requests send all prompts in an order drawn from the seed, then again; with `salt: run` each
    begins with 16 random characters."""

    kind = "dataset"
    format: Literal["auto", "openai_batch", "messages", "conversations", "prompt", "lines"] = "auto"

    @property
    def form(self) -> str:
        return self.format


class ShareGPTPrompts(RecordedPrompts):
    """The first question of every ShareGPT conversation that has an answer, after the system turns
    in front of it: a JSON list, or a line each, of {conversations: [{from, value}, …]}."""

    kind = "sharegpt"
    needs_answer = True

    @property
    def form(self) -> str:
        return "conversations"


def read_text(path: str, label: str, error: type[Exception] = ScenarioError) -> str:
    """A UTF-8 file's text. Raises `error` with the label if the file cannot be read."""
    try:
        return read_regular(Path(path), _MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as invalid:
        line = invalid.object.count(b"\n", 0, invalid.start) + 1
        raise error(f"{label}:{line}: is not UTF-8 text ({invalid.reason})") from None
    except OSError as failure:
        raise error(f"{label}: cannot be read: {failure.strerror}") from None
