"""The cache of the plotting bundle, under the name that the tests of pages use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(page_cache: Path) -> Path:
    return page_cache
