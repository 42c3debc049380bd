"""The names under `import slobench as sb` in a notebook."""

import slobench as sb


def test_every_name_leads_to_something():
    for name in sb.__all__:
        assert getattr(sb, name) is not None
        assert name in dir(sb)
    assert callable(sb.testing.check_policy)
