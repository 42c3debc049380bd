"""A mock server for the package; a test changes its script for a request by the header `x-mock`."""

import pytest

from targets.embed import mock


@pytest.fixture(scope="package")
def mock_url(tmp_path_factory):
    with mock({"ttft": "2ms", "itl": "1ms"}, tmp_path_factory.mktemp("mock")) as served:
        yield served.endpoint.url
