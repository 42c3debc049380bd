"""Tokenizers: text to token ids at once, and ids to text token by token.

ByteTokenizer         a byte is a token; for random weights and directories without tokenizer.json
  with Printable      an id is a printable character, so each token is exactly 1 delta
  with Utf8Stream     ids below 256 are bytes; incomplete characters are held back
HuggingFaceTokenizer  a local directory's tokenizer.json, through the `tokenizers` package
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from loadgen.errors import MissingDependency, UsageError

BOS_ID, EOS_ID, PAD_ID = 256, 257, 258
BYTE_VOCAB = 320  # 256 bytes and 3 specials, padded to a multiple of 64

Messages = Sequence[tuple[str, str]]  # (role, content)


class Detokenizer(Protocol):
    """The text of a stream: the returned pieces add up to the whole text."""

    def push(self, token: int) -> str:
        """Add a token and return the text that is certain by now; may be empty."""

    def flush(self) -> str:
        """Return the text still held back, at the end of the stream."""


class Tokenizer(Protocol):
    """`encode` and `render` return at least one id, because a model cannot start without any."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...

    def render(self, messages: Messages) -> list[int]:
        """The ids of a chat, up to the start of the assistant's answer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt's ids, the inverse of `encode`."""

    def detokenizer(self) -> Detokenizer:
        """Makes the text of an answer."""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token of an answer by itself."""
    detokenizer = tokenizer.detokenizer()
    return detokenizer.push(token) + detokenizer.flush()


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255. No special token is added, so n bytes are n tokens.

    The chat template is a line for each message and the beginning of the assistant's line:
    `user: <content>\\nassistant: `.
    """

    eos_ids = frozenset({EOS_ID})

    def __init__(self, printable: bool) -> None:
        self._printable = printable

    def encode(self, text: str) -> list[int]:
        # Lone surrogates are valid JSON but not valid UTF-8; they become '?', as in editors.
        return list(text.encode("utf-8", errors="replace")) or [BOS_ID]

    def render(self, messages: Messages) -> list[int]:
        return self.encode(_plain_chat(messages))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def detokenizer(self) -> Detokenizer:
        return Printable() if self._printable else Utf8Stream()


class Printable:
    """A printable ASCII character per id: the id itself if it is printable, else 32 + id mod 95."""

    def push(self, token: int) -> str:
        return chr(token if 32 <= token < 127 else 32 + token % 95)

    def flush(self) -> str:
        return ""


class Utf8Stream:
    """Bytes to text as they come. An incomplete character is held back until it is complete, an
    invalid character becomes U+FFFD. Ids above 255 have no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes((token,))) if token < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceTokenizer:
    """The tokenizer of a local `tokenizer.json`, with the chat template of `chat_template.jinja` or
    `tokenizer_config.json`, if any.

    Raises MissingDependency without the `tokenizers` package.
    """

    def __init__(self, directory: Path, eos_ids: frozenset[int]) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise MissingDependency(
                f"{directory / 'tokenizer.json'} needs the 'tokenizers' package: "
                "pip install tokenizers"
            ) from error
        self._backend = Backend.from_file(str(directory / "tokenizer.json"))
        self._specials, self._template = _chat_template(directory)
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        ids = list(self._backend.encode(text).ids)
        return ids or sorted(self.eos_ids)[:1] or [0]

    def render(self, messages: Messages) -> list[int]:
        if self._template is None:
            return self.encode(_plain_chat(messages))
        text = self._template.render(
            messages=[{"role": role, "content": content} for role, content in messages],
            add_generation_prompt=True,
            **self._specials,
        )
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    def detokenizer(self) -> Detokenizer:
        return _WindowStream(self._backend)


class _WindowStream:
    """Decodes a window of the last tokens with and without the newest, because a token's text can
    depend on the token before it (leading spaces, characters split over tokens)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        # The tokens just shown stay as context for the next token; those before them go.
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        before, now = self._decode(self._ids[: self._shown]), self._decode(self._ids)
        self._shown = len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=True)) if ids else ""


def load_tokenizer(
    directory: Path | None, printable: bool, eos_ids: frozenset[int] = frozenset()
) -> Tokenizer:
    """The tokenizer of a local directory if it is there, else bytes. `eos_ids` come from the
    model's config."""
    if directory is not None and (directory / "tokenizer.json").is_file():
        return HuggingFaceTokenizer(directory, eos_ids)
    return ByteTokenizer(printable)


def _plain_chat(messages: Messages) -> str:
    return "".join(f"{role}: {content}\n" for role, content in messages) + "assistant: "


def _chat_template(directory: Path) -> tuple[dict[str, str], Any]:
    """The special tokens by name, and the compiled template or None. A template is a program by
    the model's author, so it runs in a sandbox."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    file = directory / "chat_template.jinja"
    text = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    specials = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            specials[name] = value
    if not isinstance(text, str):
        return specials, None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return specials, environment.from_string(text)
    except TemplateError as error:
        raise UsageError(f"{directory}: chat template: {error}") from error
