"""Counting tokens on this side of the wire, so that a prompt has exactly as many as it should."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from loadgen.errors import MissingDependency, ScenarioError

_FILLERS = (".", " a", " of", "!", " 1")


class TokenCounter(Protocol):
    """Text to tokens, of which only number and places matter here. No special tokens."""

    def count(self, text: str) -> int: ...

    def ends(self, text: str) -> list[int]:
        """Where each token ends in the text, in characters, ascending."""
        ...


class Utf8Tokenizer:
    """One token per byte of UTF-8: what the bundled engine's random models use."""

    def count(self, text: str) -> int:
        return len(text.encode())

    def ends(self, text: str) -> list[int]:
        return [place for place, char in enumerate(text, 1) for _ in char.encode()]


class LocalTokenizer:
    """A Hugging Face `tokenizer.json`, read without network."""

    def __init__(self, path: Path, tokenizers: Any) -> None:
        self._inner = tokenizers.Tokenizer.from_file(str(path))
        self._inner.no_truncation()
        self._inner.no_padding()

    def count(self, text: str) -> int:
        return len(self._inner.encode(text, add_special_tokens=False).ids)

    def ends(self, text: str) -> list[int]:
        encoded = self._inner.encode(text, add_special_tokens=False)
        return [end for _, end in encoded.offsets]


def load_tokenizer(spec: str) -> TokenCounter:
    """The tokenizer of `prompts.tokenizer`: `bytes`, or a directory with a `tokenizer.json`.

    Raises MissingDependency without the package `tokenizers`, ScenarioError where the directory has
    no tokenizer that can be read.
    """
    if spec == "bytes":
        return Utf8Tokenizer()
    path = Path(spec)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ScenarioError(
            f"prompts.tokenizer: {spec} has no tokenizer.json; give a model's directory, or 'bytes'"
        )
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise MissingDependency(
            "prompts.tokenizer: counting with a model's tokenizer needs the package 'tokenizers' "
            "(pip install 'slobench[tokenizers]')"
        ) from None
    try:
        return LocalTokenizer(path, tokenizers)
    except Exception as error:  # the library raises bare Exceptions for files it cannot read
        raise ScenarioError(f"prompts.tokenizer: {path}: {error}") from None


def cut_to_tokens(tokenizer: TokenCounter, text: str, n_tokens: int, lead: str = "") -> str:
    """The beginning of `text` for which `lead` + beginning has `n_tokens` tokens, with a filler at
    the end where cutting alone does not get there (merges reach over the cut); at least one
    character. Where no try is exact, the nearest. It does not end in a blank (templates strip it).
    """
    assert text, "there is no text to fit"
    ends = tokenizer.ends(lead + text)
    best, best_off = text[:1], abs(tokenizer.count(lead + text[:1]) - n_tokens)
    for wanted in (n_tokens, n_tokens + 1, *range(n_tokens - 1, max(0, n_tokens - 8), -1)):
        if not best_off:
            break
        place = ends[min(max(wanted, 1), len(ends)) - 1] - len(lead)
        for candidate in _candidates(tokenizer, lead, text[: max(1, place)], n_tokens):
            off = abs(tokenizer.count(lead + candidate) - n_tokens)
            if off < best_off and not candidate[-1].isspace():
                best, best_off = candidate, off
    return best


def _candidates(tokenizer: TokenCounter, lead: str, cut: str, n_tokens: int) -> list[str]:
    """The cut itself, or with fillers while it is short by a few tokens."""
    found = [cut]
    missing = n_tokens - tokenizer.count(lead + cut)
    if 0 < missing <= 8:
        for filler in _FILLERS:
            padded = cut + filler * missing
            found.append(padded)
    return found
