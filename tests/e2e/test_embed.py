"""The engine and the mock as targets: options in, an endpoint out, one line for a failure."""

import json
from urllib.request import urlopen

import pytest

from loadgen.errors import UsageError
from targets.embed import engine, mock, parse_engine

pytestmark = pytest.mark.e2e


def test_engine_options_are_read_from_the_flag():
    assert parse_engine("mode=chunked, shape=tiny,max-model-len=128,") == {
        "mode": "chunked",
        "shape": "tiny",
        "max_model_len": "128",
    }
    assert parse_engine("") == {}
    assert parse_engine("mode=chunked,watermark=0.05")["watermark"] == "0.05"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("chunked", "option 'chunked': expected key=value"),
        ("mode=a,mode=b", "engine option 'mode' is given twice: a and b"),
    ],
)
def test_a_wrong_engine_option_is_one_line(text, problem):
    with pytest.raises(UsageError) as caught:
        parse_engine(text)
    assert problem in str(caught.value)


def test_the_mock_is_labelled_with_its_script_but_not_its_key(tmp_path):
    with mock({"ttft": "3ms", "api_key": "sk-x"}, tmp_path) as served:
        manifest = served.endpoint.to_manifest()
    assert manifest["labels"] == {"engine": "mock", "flags": "ttft=3ms"}
    assert "sk-x" not in repr(served)


def test_the_bundled_engine_serves_and_is_labelled(tmp_path):
    with engine({"device": "toy", "shape": "nano"}, tmp_path) as served:
        assert served.endpoint.url == served.child.url
        flags = "mode=chunked shape=nano device=toy threads=1"
        assert served.endpoint.labels.flags == flags
    assert served.child.exit_code is not None
    assert (tmp_path / "engine.log").exists()
    assert (tmp_path / "engine_steps.parquet").exists()


def test_a_mode_of_the_users_own_is_served(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from reference_engine.policies.base import POLICIES\n"
        "from reference_engine.policies.chunked import Chunked\n"
        "@POLICIES.register\n"
        "class Mine(Chunked):\n"
        "    kind = 'mine'\n"
        "    fancy: int = 3\n"
    )
    options = {"device": "toy", "shape": "nano", "mode": "mine", "fancy": "5"}
    with (
        engine(options, tmp_path, plugins=[plugin]) as served,
        urlopen(f"{served.endpoint.url}/debug/policy") as response,
    ):
        policy = json.load(response)
    assert (policy["mode"], policy["knobs"]["fancy"]) == ("mine", 5)
    assert "mine" in policy["modes"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mdoe": "x"}, "unknown engine option 'mdoe'; did you mean 'mode'?"),
        ({"watermark": "2"}, "mode 'chunked': watermark: "),
    ],
)
def test_an_option_that_the_engine_cannot_serve_raises_its_last_line(tmp_path, options, problem):
    with pytest.raises(UsageError) as caught:
        engine({"device": "toy", **options}, tmp_path).__enter__()
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_busy_port_of_the_engine_is_one_line(tmp_path):
    with mock({}, tmp_path) as served:
        port = served.endpoint.url.rsplit(":", 1)[1]
        with pytest.raises(UsageError, match=port):
            engine({"device": "toy", "shape": "nano", "port": port}, tmp_path).__enter__()
