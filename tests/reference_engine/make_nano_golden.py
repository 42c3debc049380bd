"""Write tests/golden/nano_logits.json: logits of `transformers` for a nano model of each family, an
independent oracle for machines without `transformers`.

    python -m tests.reference_engine.make_nano_golden

Run it from the root when the nano shape or its weights change.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.reference_engine.llama_oracle import FAMILIES, PROMPT, huggingface_logits, random_state

GOLDEN = Path(__file__).parent.parent / "golden" / "nano_logits.json"
POSITIONS = [0, 15, 16, 69]


def main() -> None:
    frozen = {}
    for name, config in FAMILIES.items():
        logits = huggingface_logits(config, random_state(config), PROMPT)
        frozen[name] = {str(i): [round(x, 6) for x in logits[i].tolist()] for i in POSITIONS}
    GOLDEN.write_text(json.dumps(frozen) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
