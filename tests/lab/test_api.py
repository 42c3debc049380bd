"""The names under `import slobench as sb` in a notebook."""

import inspect
from dataclasses import fields

import pytest

import slobench as sb
from loadgen.errors import UsageError
from loadgen.run.run_options import RunOptions
from loadgen.studies.sweep.spec import SweepFile


def test_every_name_leads_to_something():
    for name in sb.__all__:
        assert getattr(sb, name) is not None
        assert name in dir(sb)
    assert callable(sb.testing.check_policy)


@pytest.mark.parametrize("function", [sb.run, sb.capacity, sb.sweep])
def test_the_signature_lists_each_option_of_a_run(function):
    """A notebook completes from the signature; each option is keyword-only, with its default."""
    parameters = inspect.signature(function).parameters
    assert {field.name for field in fields(RunOptions)} <= set(parameters)
    for name, default in (("engine", ""), ("n_workers", 0), ("scrape", True)):
        assert parameters[name].default == default
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
    assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def test_an_unknown_option_of_a_run_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match="'engin'; did you mean 'engine'"):
        sb.run(sb.load_scenario("quickstart"), "sim", tmp_path / "run", engin="shape=8b")
    assert not (tmp_path / "run").exists()


def test_the_keys_of_a_sweep_file_have_its_defaults_in_python():
    parameters = inspect.signature(sb.sweep).parameters
    stated = {name: p.default for name, p in parameters.items() if name in SweepFile.model_fields}
    file = SweepFile.model_validate({"over": {}, "drain": stated.pop("drain")})
    stated = {name: default for name, default in stated.items() if name in KEYS}
    assert stated == {name: getattr(file, name) for name in KEYS}
    assert file.drain == SweepFile.model_validate({"over": {}}).drain


KEYS = ("how", "repeats", "metric", "throughput", "along", "order_seed", "reset_cache")
