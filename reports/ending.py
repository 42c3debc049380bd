"""The last lines of a verb, for the terminal and for the first screen of a page: the result, a row
per judged thing, facts, the worst findings, and the next command."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.text import Text

Tone = Literal["met", "missed", "unknown", "invalid"]
MOST_FINDINGS = 3
_WIDTH = 100
_WORDS_AT = 13  # the column at which a line's words begin
_WIDEST_NAME = 34
_STYLES = {"met": "bold green", "missed": "bold red", "unknown": "bold", "invalid": "bold yellow"}


@dataclass(frozen=True, slots=True)
class NextStep:
    """A step that follows from a result, with a command where one helps. `short` is its text in an
    ending, where that is shorter."""

    text: str
    command: str = ""
    short: str = ""


@dataclass(frozen=True, slots=True)
class EndingRow:
    """A judged thing with its mark (✓ met, ✗ missed, ? no verdict, "" none) and its value."""

    mark: str
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Ending:
    """The lines of an ending: the verdict as `word` and `result`, rows, `facts` with a word each
    (`why`, `traffic`, `certainty`, …), at most three findings, and the next step. `n_rows` more
    rows, of `noun`, and `n_findings` more findings are shown with `--full` only."""

    tone: Tone
    word: str
    result: str
    rows: tuple[EndingRow, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    findings: tuple[str, ...] = ()
    next: NextStep | None = None
    n_rows: int = 0
    n_findings: int = 0
    noun: str = "SLO"


def rendered(found: Ending, width: int) -> Text:
    """The ending for a console, the first line in the colour of the result."""
    from rich.text import Text

    lines = Text(text(found, min(width, _WIDTH)))
    end = lines.plain.find("\n")
    lines.stylize(_STYLES[found.tone], 0, None if end < 0 else end)
    return lines


def text(found: Ending, width: int = _WIDTH) -> str:
    """The ending as lines of at most `width` columns; a command stays in one line, to be copied."""
    lines = textwrap.wrap(
        ": ".join(filter(None, (found.word, found.result))), width, subsequent_indent="  "
    )
    longest = max((len(line.name) for line in found.rows), default=0)
    column = min(longest, _WIDEST_NAME)
    for line in found.rows:
        head = f"  {line.mark or ' '} {line.name:{column}}  "
        lines += _wrapped(head, line.value, width, column + 6)
    if found.n_rows:
        noun = found.noun if found.n_rows == 1 else f"{found.noun}s"
        lines.append(f"  + {found.n_rows} more {noun}: --full")
    for word, words in found.facts:
        lines += _wrapped(f"  {word:{_WORDS_AT - 2}}", words, width, _WORDS_AT)
    for finding in found.findings:
        lines += _wrapped(f"  {'note':{_WORDS_AT - 2}}", finding, width, _WORDS_AT)
    if found.n_findings:
        notes = "note" if found.n_findings == 1 else "notes"
        lines.append(f"{' ' * _WORDS_AT}+ {found.n_findings} more {notes}: --full")
    if found.next is not None:
        head = f"  {'next':{_WORDS_AT - 2}}"
        step = f"{found.next.text[:1].lower()}{found.next.text[1:]}"
        if found.next.command:
            lines += _wrapped(head, step, width, _WORDS_AT)
            if len(lines[-1]) + 1 + len(found.next.command) <= width:
                lines[-1] += f" {found.next.command}"
            else:
                lines.append(f"{' ' * _WORDS_AT}{found.next.command}")
        else:
            lines += _wrapped(head, step.rstrip("."), width, _WORDS_AT)
    return "\n".join(lines)


def _wrapped(head: str, words: str, width: int, indent: int) -> list[str]:
    return textwrap.wrap(
        f"{head}{words}",
        width,
        subsequent_indent=" " * min(indent, width // 2),
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    ) or [head.rstrip()]
