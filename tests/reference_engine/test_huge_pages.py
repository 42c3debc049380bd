"""Memory in large pages is memory like any other."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
huge_pages = pytest.importorskip("reference_engine.model.huge_pages")


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 1 << 20), (0, 4)])
def test_it_begins_as_zeros_and_keeps_what_is_written(shape):
    memory = huge_pages.zeros(*shape)
    assert memory.shape == shape
    assert memory.dtype == torch.float32
    assert memory.is_contiguous()
    assert not memory.any()
    memory.view(-1)[-1:] = 2.5
    assert memory.sum() == (0.0 if 0 in shape else 2.5)
    assert not huge_pages.zeros(*shape).any()


def test_a_system_without_large_pages_gives_small_ones(monkeypatch):
    """Advice that no system knows is refused like this one where large pages are not built in."""
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999)
    memory = huge_pages.zeros(3, 4)
    memory += 1
    assert memory.sum() == 12
