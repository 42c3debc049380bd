"""What a page or a terminal shows, read back from the text alone."""

from __future__ import annotations

import re
from html import unescape

UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "%": 0.01}


def number(text: str) -> float | None:
    """The SI value a text shows, None for none."""
    words = text.replace("*", "").replace("of requests", "").replace("\u202f", "")
    words = re.sub(r"^(at most|at least) ", "", words).strip()
    if words in ("–", "∞"):
        return None
    match = re.fullmatch(r"([-+]?[\d.]+(?:e[-+]?\d+)?)\s*(ns|µs|ms|s|min|h|%|/s|points)?", words)
    assert match, f"{text!r} is no number"
    return float(match[1]) * {**UNITS, "points": 0.01}.get(match[2] or "", 1.0)


def tables(page: str) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of a page: their heads and their rows, as texts."""
    found = []
    for table in re.findall(r"<table.*?</table>", page, flags=re.S):
        head = [_text(one) for one in re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table, re.S)]
        body = table.partition("<tbody>")[2]
        rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", one, re.S)
                for one in re.findall(r"<tr[^>]*>(.*?)</tr>", body, re.S)]  # fmt: skip
        found.append((head, [[_text(cell) for cell in row] for row in rows]))
    return found


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()
