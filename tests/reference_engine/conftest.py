"""Fixtures of the engine's tests."""

from __future__ import annotations

import pytest

from tests.reference_engine.engine_server import Form


@pytest.fixture(params=[False, True], ids=["whole", "split"])
def both_forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the server in one piece, and split."""
    monkeypatch.setattr(Form, "is_split", request.param)
