"""Memory in huge pages behaves like any other memory."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
huge_pages = pytest.importorskip("reference_engine.model.huge_pages")


@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 1 << 20), (0, 4)])
def test_it_begins_as_zeros_and_keeps_written_numbers(shape):
    memory = huge_pages.zeros(*shape)
    assert memory.shape == shape
    assert memory.dtype == torch.float32
    assert memory.is_contiguous()
    assert not memory.any()
    memory.view(-1)[-1:] = 2.5
    assert memory.sum() == (0.0 if 0 in shape else 2.5)
    assert not huge_pages.zeros(*shape).any()


def test_a_system_without_huge_pages_returns_small_pages(monkeypatch):
    """An unknown advice fails as this advice does on a kernel that was built without huge pages."""
    monkeypatch.setattr("mmap.MADV_HUGEPAGE", 9999)
    memory = huge_pages.zeros(3, 4)
    memory += 1
    assert memory.sum() == 12


@pytest.mark.faults
@pytest.mark.skipif(sys.platform != "linux", reason="mincore(2)")
def test_a_pool_of_usual_size_is_in_memory_from_the_start():
    memory = huge_pages.zeros(1 << 20)
    page, n_bytes = mmap.PAGESIZE, 4 << 20
    pages = (ctypes.c_ubyte * (n_bytes // page))()
    address = ctypes.c_void_p(memory.data_ptr())
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(address, ctypes.c_size_t(n_bytes), pages) == 0
    assert sum(state & 1 for state in pages) == len(pages)
