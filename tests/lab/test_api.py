"""The names under `import slobench as sb` in a notebook."""

from dataclasses import fields

import slobench as sb
from loadgen.run.run_options import RunKeywords, RunOptions
from loadgen.studies.sweep.run import _OF_A_RUN, SweepKeywords
from loadgen.studies.sweep.spec import SweepFile


def test_every_name_leads_to_something():
    for name in sb.__all__:
        assert getattr(sb, name) is not None
        assert name in dir(sb)
    assert callable(sb.testing.check_policy)


def test_the_typed_keywords_are_the_options_of_a_run():
    stated = {"out_dir", "confidence"}  # parameters of the functions themselves
    assert RunKeywords.__optional_keys__ == {f.name for f in fields(RunOptions)} - stated


def test_the_typed_keywords_of_a_sweep_are_keys_of_its_file_or_options_of_a_run():
    rest = SweepKeywords.__optional_keys__ - set(_OF_A_RUN)
    assert rest == {"along", "order_seed", "drain", "reset_cache"}
    assert rest < set(SweepFile.model_fields)
    assert set(_OF_A_RUN) < SweepKeywords.__optional_keys__
