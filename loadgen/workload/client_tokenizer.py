"""Token counting on the client, for prompts with an exact number of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from loadgen.errors import MissingDependency, ScenarioError

_FILLERS = (".", " a", " of", "!", " 1")


class TokenCounter(Protocol):
    """A tokenizer reduced to the number and positions of tokens; no special tokens."""

    def count(self, text: str) -> int: ...

    def ends(self, text: str) -> list[int]:
        """The end of each token in the text, in characters, ascending."""
        ...


class Utf8Tokenizer:
    """A token per byte of UTF-8, as for the bundled engine's random models."""

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

    Raises MissingDependency without the package `tokenizers`, ScenarioError if the directory has no
    readable tokenizer.
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
    """The beginning of `text` that has `n_tokens` tokens together with `lead` in front; at least 1
    character, and no blank at the end (templates strip it).

    If no cut has the exact number (a merge may span the cut), a filler is appended; if that fails
    too, the nearest number is taken.
    """
    assert text, "there is no text to cut"
    ends = tokenizer.ends(lead + text)
    best, error = text[:1], abs(tokenizer.count(lead + text[:1]) - n_tokens)
    for n_cut in (n_tokens, n_tokens + 1, *range(n_tokens - 1, max(0, n_tokens - 8), -1)):
        if not error:
            break
        place = ends[min(max(n_cut, 1), len(ends)) - 1] - len(lead)
        cut = text[: max(1, place)]
        missing = n_tokens - tokenizer.count(lead + cut)
        padded = [cut + filler * missing for filler in _FILLERS] if 0 < missing <= 8 else []
        for candidate in (cut, *padded):
            candidate_error = abs(tokenizer.count(lead + candidate) - n_tokens)
            if candidate_error < error and not candidate[-1].isspace():
                best, error = candidate, candidate_error
    return best
