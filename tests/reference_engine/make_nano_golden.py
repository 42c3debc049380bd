"""Writes tests/golden/nano_logits.json: logits of the nano shape (random weights, seed 0) computed
by transformers' LlamaForCausalLM, so that machines without transformers have an oracle of
another hand.

To be run by hand, from the root, when the nano shape or its weights change.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

from reference_engine.model.weights import random_weights
from reference_engine.model.zoo import SHAPES

GOLDEN = Path(__file__).parent.parent / "golden" / "nano_logits.json"
PROMPT = [(31 * i * i + 7) % 320 for i in range(40)]
POSITIONS = [0, 15, 16, 39]


def main() -> None:
    nano = SHAPES["nano"]
    config = transformers.LlamaConfig(
        vocab_size=nano.vocab_size,
        hidden_size=nano.d_model,
        num_hidden_layers=nano.n_layers,
        num_attention_heads=nano.n_heads,
        num_key_value_heads=nano.n_kv_heads,
        head_dim=nano.head_dim,
        intermediate_size=nano.d_ffn,
        rms_norm_eps=nano.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": nano.rope_theta},
        tie_word_embeddings=nano.tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(random_weights(nano, seed=0))
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0]
    data = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "prompt": PROMPT,
        "logits": {str(i): [round(x, 6) for x in logits[i].tolist()] for i in POSITIONS},
    }
    GOLDEN.write_text(json.dumps(data) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
