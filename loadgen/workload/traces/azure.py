"""Azure's public LLM inference traces of 2023, 2024 and 2025 (multimodal)."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from loadgen.workload.traces.text_columns import read_csv
from loadgen.workload.traces.trace import Trace, TraceColumns, TraceFormat, build_trace

_TIME, _IN, _OUT, _IMAGES = "TIMESTAMP", "ContextTokens", "GeneratedTokens", "NumImages"


class Azure(TraceFormat):
    """Azure LLM inference traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens and, in 2025,
    NumImages.

    Timestamps keep their seven digits (100 ns). Files of 2023 have no time zone; those of 2024 have
    a time zone and may lack the fraction. Requests with images are sent as text of the same number
    of context tokens, and counted in a note.

    Source: P. Patel et al., Splitwise (ISCA 2024), and the dataset's own README.
    """

    kind = "azure"

    @classmethod
    def is_mine(cls, fields: Collection[str]) -> bool:
        return {_TIME, _IN, _OUT} <= set(fields)

    def parse(self, content: bytes, source: str) -> Trace:
        table = read_csv(content, source, (_TIME, _IN, _OUT))
        notes = []
        if table.has(_IMAGES):
            images = table.whole_numbers(_IMAGES)
            n_images = int(np.count_nonzero(images))
            notes = [f"{n_images} of {len(images)} requests had images; sent as text only"]
        columns = TraceColumns(
            ticks=table.instants(_TIME),
            input_tokens=table.whole_numbers(_IN),
            output_tokens=table.whole_numbers(_OUT),
            slo_s=table.limits(),
            notes=notes,
        )
        return build_trace(source, self.kind, columns)
