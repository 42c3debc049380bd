"""The allocator of Arrow."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

READ = (
    "import os\n"
    "from loadgen.archive.arrow import pa\n"
    "print(pa.default_memory_pool().backend_name, os.environ.get('ARROW_DEFAULT_MEMORY_POOL'))"
)


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "system None"), ({"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"}, "mimalloc mimalloc")],
)
def test_arrow_has_the_allocator_of_the_c_library_or_the_users_choice(given, expected):
    environ = {k: v for k, v in os.environ.items() if k != "ARROW_DEFAULT_MEMORY_POOL"}
    done = subprocess.run(
        [sys.executable, "-c", READ], capture_output=True, text=True, env={**environ, **given}
    )
    assert done.stdout.split("\n")[0] == expected, done.stderr
