"""Prompt lengths as a server with a byte-pair tokenizer and a chat template counts them."""

import json
import re

import numpy as np
import pytest
import yaml

from loadgen.archive.store import read_run
from loadgen.workload.vocabulary import WORDS

pytestmark = pytest.mark.e2e

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": 8,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 12, "vocab_size": 700,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "eos_token_id": 1,
}  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SCENARIO = {
    "schema": 1,
    "name": "lengths",
    "arrivals": {"kind": "constant", "rate": "15/s"},
    "requests": {
        "input_tokens": {"kind": "uniform", "min": 90, "max": 700},
        "output_tokens": 12,
        "shared_prefix": {"tokens": 48, "groups": 2},
    },
    "session": {"turns": 2, "think": "0s"},
    "phases": {"warmup": "0s", "measure": "2s", "drain": "10s"},
    "limits": {"timeout": "20s"},
    "slo": ["ttft <= 30s"],
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    folder = tmp_path_factory.mktemp("bpe")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    rng = np.random.default_rng(3)
    inner.train_from_iterator([" ".join(rng.choice(WORDS, 30)) for _ in range(200)], trainer)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def test_every_prompt_is_within_a_token_of_its_plan(cli, model_dir, tmp_path):
    """Chat template, salt, shared prefixes and a second turn, on a tokenizer nobody told us of."""
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(SCENARIO))
    result = cli(
        "run", "s.yaml", "--target=reference", f"--engine=device=toy,shape={model_dir}",
        *cli.lenient, "--out=run", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "prompt lengths exact to ≤ 1 token (calibrated on " in result.stderr
    run = read_run(tmp_path / "run")
    asked, got = run.schedule_rows["input_tokens"], run.request_rows["input_tokens"]
    counted = got > 0  # a second turn may come due only after the window, on a busy machine
    assert counted.sum() >= 45
    assert np.abs(asked.astype(int) - got.astype(int))[counted].max() <= 1
    assert run.manifest.salt
    checks = json.loads((tmp_path / "run" / "summary.json").read_text())["validity"]["checks"]
    lengths = next(check for check in checks if check["name"] == "input lengths")
    within = re.search(r"(\d+) of (\d+) within one token", lengths["detail"])
    assert within is not None
    assert within[1] == within[2]
