"""What the tests of nights share: the plotting bundle, which takes seconds to make."""

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache") / "slobench"
