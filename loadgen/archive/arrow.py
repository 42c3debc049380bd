"""pyarrow with the allocator of the C library, unless ARROW_DEFAULT_MEMORY_POOL names another.

Arrow's own allocator keeps the memory of a table that was written, 40 MB for 10⁵ requests; the C
library's leaves it to the arrays of the summary. Arrow reads the variable once, while pyarrow is
imported. It is unset again afterwards: a server that is launched must not inherit it.
"""

from __future__ import annotations

import os

_POOL = "ARROW_DEFAULT_MEMORY_POOL"
_is_ours = _POOL not in os.environ
os.environ.setdefault(_POOL, "system")
try:
    import pyarrow as pa
    from pyarrow import parquet
finally:
    if _is_ours:
        del os.environ[_POOL]

__all__ = ["pa", "parquet"]
