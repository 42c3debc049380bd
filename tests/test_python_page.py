"""The page about the Python API runs as it stands, from top to bottom."""

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "python.md"


def test_every_snippet_runs_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(snippets) >= 5
    names: dict[str, object] = {}
    for snippet in snippets:
        exec(compile(snippet, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert "met every SLO" in printed
    assert (tmp_path / "vllm.json").stat().st_size > 1000
    assert "p99(tpot) <= 20ms" in printed
