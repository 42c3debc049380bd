"""The cache of the plotting bundle, under the name that the tests of studies use."""

import pytest


@pytest.fixture(scope="session")
def cache(page_cache):
    return page_cache
