"""A check for NVIDIA's driver that takes no import of torch."""

import ctypes

import pytest


def skip_without_driver() -> None:
    """Skip the module in which it is called if the driver's library is not installed."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("NVIDIA's driver is not installed", allow_module_level=True)
