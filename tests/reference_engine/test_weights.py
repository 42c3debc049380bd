"""Weights and configs from local files, and errors that list the files and tensors searched for."""

from __future__ import annotations

import json
import struct

import pytest

from loadgen.errors import UsageError
from reference_engine.model.zoo import SHAPES, resolve
from reference_engine.state.model_config import ModelConfig, ModelSource, config_from, read_config

torch = pytest.importorskip("torch", reason="torch is not installed")
weights = pytest.importorskip("reference_engine.model.weights")

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": [3, 4],
}


def write_safetensors(path, tensors):
    """The format by hand: header length, header, data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def model_directory(path, config=LLAMA, shards=1):
    """A whole model in bf16; the k-th tensor holds the number k. Returns the numbers by name."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    names = list(weights.shapes(config_from(config)).items())
    if shards == 1:
        files = {"model.safetensors": names}
    else:
        files = {f"model-{i}.safetensors": names[i::shards] for i in range(shards)}
        index = {name: file for file, part in files.items() for name, _ in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    number = {name: float(i + 1) for i, (name, _) in enumerate(names)}
    for file, part in files.items():
        tensors = {}
        for name, shape in part:
            bf16 = struct.pack("<f", number[name])[2:]
            size = 1
            for n in shape:
                size *= n
            tensors[name] = ("BF16", list(shape), bf16 * size)
        write_safetensors(path / file, tensors)
    return number


@pytest.mark.parametrize("shards", [1, 3])
def test_a_local_directory_is_read_as_float32(tmp_path, shards):
    number = model_directory(tmp_path / "model", shards=shards)
    source = resolve(str(tmp_path / "model"))
    loaded = weights.load(source)
    assert source.name == "model"
    assert {name: float(t.mean()) for name, t in loaded.items()} == number
    assert {t.dtype for t in loaded.values()} == {torch.float32}


def test_numbers_and_shapes_are_read_by_their_offsets(tmp_path):
    path = tmp_path / "two.safetensors"
    first, second = struct.pack("<6f", *range(6)), struct.pack("<2e", 0.5, -2.0)
    write_safetensors(path, {"a": ("F32", [2, 3], first), "b": ("F16", [2], second)})
    loaded = weights.read_safetensors(path)
    assert loaded["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert loaded["b"].tolist() == [0.5, -2.0]


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\x05\x00")
    with pytest.raises(UsageError, match=r"bad\.safetensors: not a safetensors file"):
        weights.read_safetensors(path)
    write_safetensors(path, {"a": ("I64", [1], b"\0" * 8)})
    with pytest.raises(UsageError, match=r"a: dtype I64 \(supported: F32"):
        weights.read_safetensors(path)


def test_errors_list_missing_files_and_tensors(tmp_path):
    with pytest.raises(UsageError, match=r"neither a shape nor a local model directory; did you"):
        resolve("tinny")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(
        UsageError, match=r"looked for model\.safetensors\.index\.json and model\.s"
    ):
        weights.load(resolve(str(tmp_path)))
    model_directory(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2}))
    with pytest.raises(UsageError, match=r"9 tensors are missing, e\.g\. model\.layers\.1\.input"):
        weights.load(resolve(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 21}))
    with pytest.raises(
        UsageError, match=r"embed_tokens\.weight has shape \(20, 8\); config\.json requires"
    ):
        weights.load(resolve(str(tmp_path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("{}", "cannot run 'none'"),
        (json.dumps({"architectures": ["LlamaForCausalLM"]}), "'num_attention_heads' is missing"),
        (json.dumps({**LLAMA, "architectures": ["LlamaForCausal"]}), "did you mean 'LlamaForCau"),
        (json.dumps({**LLAMA, "attention_bias": True}), "attention_bias: true is not supported"),
        (
            json.dumps({**LLAMA, "rope_scaling": {"rope_type": "yarn"}}),
            "cannot compute type 'yarn'",
        ),
    ],
)
def test_an_unsupported_config_is_an_error_with_file_and_key(tmp_path, text, words):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"config.json: .*{words}"):
        read_config(path)


def test_a_config_is_read_with_the_keys_of_transformers_4_and_5():
    old = config_from({**LLAMA, "rope_theta": 5e5})
    new = config_from({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert old == new
    assert old == ModelConfig(
        n_layers=1,
        d_model=8,
        n_heads=2,
        n_kv_heads=1,
        head_dim=4,
        d_ffn=12,
        vocab_size=20,
        max_model_len=64,
        rope_theta=5e5,
        tied=True,
        eos_ids=frozenset({3, 4}),
    )


def test_the_zoo_has_the_sizes_it_is_named_after():
    millions = {name: shape.n_params / 1e6 for name, shape in SHAPES.items()}
    assert millions["nano"] == pytest.approx(0.13, abs=0.05)
    assert millions["tiny"] == pytest.approx(0.82, abs=0.05)
    assert millions["10m"] == pytest.approx(10, rel=0.1)
    assert millions["0.6b"] == pytest.approx(596, rel=0.01)
    assert millions["1b"] == pytest.approx(1236, rel=0.01)
    assert millions["8b"] == pytest.approx(8030, rel=0.01)
    assert millions["70b"] == pytest.approx(70_550, rel=0.01)
    assert SHAPES["8b"].kv_bytes_per_token(2) == 131_072


def test_random_weights_are_a_function_of_the_seed():
    config = SHAPES["nano"]
    a, b = weights.random_weights(config, 1), weights.random_weights(config, 1)
    c = weights.random_weights(config, 2)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(a[name], b[name])
    assert not torch.equal(a[name], c[name])
    assert float(a[name].std()) == pytest.approx(0.02, rel=0.02)


def test_a_model_larger_than_memory_is_rejected_before_it_is_allocated():
    huge = ModelSource("huge", ModelConfig(1000, 65536, 512, 512, 128, 262144, 320))
    with pytest.raises(UsageError, match=r"'huge' needs .* GB for float32 weights"):
        weights.load(huge)


def test_qwen2_has_a_bias_on_queries_keys_and_values():
    config = config_from(LLAMA | {"architectures": ["Qwen2ForCausalLM"]})
    assert (config.qkv_bias, config.qk_norm) == (True, False)
    biases = {name: shape for name, shape in weights.shapes(config).items() if "bias" in name}
    at = "model.layers.0.self_attn"
    assert biases == {
        f"{at}.q_proj.bias": (8,),
        f"{at}.k_proj.bias": (4,),
        f"{at}.v_proj.bias": (4,),
    }
    assert config.n_params == sum(t.numel() for t in weights.random_weights(config, 0).values())
