"""The exception tree, with the exit code of each class.

    SlobenchError              exit 4  base; never raised itself
    ├── UsageError             exit 2  the command line, a file or a value is wrong; fix and repeat
    │   ├── ScenarioError      exit 2  a scenario, with file, line and key path
    │   ├── TargetFileError    exit 2  an invalid target file or URL
    │   ├── TraceFileError     exit 2  a recorded trace that cannot be read, with file and line
    │   └── UnknownKind        exit 2  a plug-in name that is not registered (also a ValueError)
    ├── TargetError            exit 3  the endpoint cannot be measured: no run, so no verdict
    ├── RunInvalid             exit 3  the load generator or its record broke: rows lost, shard died
    └── MissingDependency      exit 2  an optional package is absent; names the extra to install

A request that fails is *data* (`records.Status`), never an exception. An exception outside this
tree is a bug in slobench: the CLI writes it to a file, prints the file's name, and exits 4.
"""

from __future__ import annotations

from collections.abc import Iterable


class SlobenchError(Exception):
    """Base of every exception that slobench raises on purpose; the CLI exits with `exit_code`."""

    exit_code = 4


class UsageError(SlobenchError):
    """Wrong user input; the message states the expected value, the actual one, the place and the
    fix."""

    exit_code = 2


class ScenarioError(UsageError):
    """An invalid scenario; one `file:line: key.path: problem` line per mistake."""


class TargetFileError(UsageError):
    """An invalid target file or URL."""


class TraceFileError(UsageError):
    """A trace file that cannot be read; `file:line: reason`."""


class UnknownKind(UsageError, ValueError):
    """A kind that is not registered. Also a ValueError, so that pydantic attaches the key path."""


class TargetError(SlobenchError):
    """The endpoint is unreachable or unfit for measuring, so there is no run and no verdict."""

    exit_code = 3


class RunInvalid(SlobenchError):
    """The load generator or its record broke: a shard died, rows are missing, a file is damaged."""

    exit_code = 3


class MissingDependency(SlobenchError):
    """An optional package is absent; the message names the extra that contains it."""

    exit_code = 2


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt in an exception's chain of causes, or None.

    C code that calls Python (pydantic's serializers) replaces every exception by one of its own.
    """
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, KeyboardInterrupt):
            return behind
        behind = behind.__cause__
    return None


def notes_behind(error: BaseException) -> list[str]:
    """The notes of an exception and of those that it was raised from or during, such as the command
    that recovers an interrupted run."""
    notes: list[str] = []
    behind: BaseException | None = error
    seen: set[int] = set()  # an exception raised again can be its own context
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        notes += getattr(behind, "__notes__", ())
        behind = behind.__cause__ or behind.__context__
    return notes


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an unknown-name message: the closest name if any is close, then all names. The
    words of the OpenAI API count as ours: `prompt_tokens` is close to `input_tokens`.

    >>> nearest("poison", ["poisson", "gamma"])
    "did you mean 'poisson'? (known: gamma, poisson)"
    >>> nearest("zzz", ["poisson"])
    "known: poisson"
    """
    import difflib  # 3 ms, for a message only

    choices = sorted(known)
    names = f"known: {', '.join(choices) or 'none'}"
    close = [
        (difflib.SequenceMatcher(None, choice, text).ratio(), choice)
        for text in (word, _in_our_words(word))
        for choice in difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    ]
    return f"did you mean '{max(close)[1]}'? ({names})" if close else names


def _in_our_words(word: str) -> str:
    for theirs, ours in (("prompt", "input"), ("completion", "output")):
        word = word.replace(theirs, ours)
    return word
