"""Load generators: the command of each, its settings as its documentation recommends them, and the
file that it writes.

A settings file (`--peers FILE`) changes them or adds others:

    vllm-rs:
      command: vllm-rs bench serve --base-url {url} --request-rate {rate} …
      result: result.json     # in {out}, of a format that `slobench import` reads
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from loadgen.errors import UsageError, nearest
from loadgen.registry import Strict
from loadgen.yaml_document import parse_document, read_file, write_document

SLOBENCH = "slobench"
VALUES = (
    "url", "rate", "requests", "seconds", "input_tokens", "output_tokens", "seed", "tokenizer",
    "out", "python",
)  # fmt: skip
"""The names that a command may contain in braces. `python` is the interpreter in the folder of the
program, `tokenizer` the folder of a Hugging Face tokenizer, `out` the folder for its files."""
_NAME = re.compile(r"\{([A-Za-z_]+)\}")
_OF_VLLM = (
    "bench serve --backend openai-chat --endpoint /v1/chat/completions --base-url {url}"
    " --model mock --tokenizer {tokenizer} --dataset-name random"
    " --random-input-len {input_tokens} --random-output-len {output_tokens} --ignore-eos"
    " --request-rate {rate} --num-prompts {requests} --seed {seed}"
    " --save-result --save-detailed --result-dir {out} --result-filename result.json"
)


class Peer(Strict):
    """`command` is a command line with VALUES in braces. `program`, the default is its first word,
    is what must be installed. `result` is a file in `{out}`; `distribution` the package that states
    the version, `install` the command that installs it, `settings` the page that describes them."""

    command: str
    result: str
    program: str = ""
    distribution: str = ""
    install: str = ""
    settings: str = ""

    @property
    def needs(self) -> str:
        return self.program or shlex.split(self.command)[0]


PEERS: Mapping[str, Peer] = {
    "vllm-rs": Peer(
        command=f"vllm-rs {_OF_VLLM} --temperature 0 --disable-tqdm",
        result="result.json",
        distribution="vllm",
        install="pip download --no-deps vllm, which has the program as vllm/vllm-rs; put it on "
        "the PATH",
        settings="https://docs.vllm.ai/en/latest/benchmarking/cli/",
    ),
    "vllm bench": Peer(
        command=f"vllm {_OF_VLLM}",
        result="result.json",
        distribution="vllm",
        install="pip install vllm",
        settings="https://docs.vllm.ai/en/latest/benchmarking/cli/",
    ),
    "guidellm": Peer(
        command="guidellm run --backend kind=openai_http,target={url},model=mock,"
        "validate_backend=false,request_format=/v1/chat/completions"
        " --tokenizer kind=huggingface_auto,model={tokenizer}"
        " --data kind=synthetic_text,prompt_tokens={input_tokens},output_tokens={output_tokens}"
        " --profile kind=poisson,rate={rate} --constraint kind=max_duration,seconds={seconds}"
        " --output kind=json,path={out}/result.json --disable-console-interactive",
        result="result.json",
        distribution="guidellm",
        install="pip install guidellm",
        settings="https://github.com/vllm-project/guidellm#readme",
    ),
    "aiperf": Peer(
        command="aiperf profile --model mock --url {url} --endpoint-type chat --streaming"
        " --tokenizer {tokenizer} --use-server-token-count --isl {input_tokens}"
        " --osl {output_tokens} --extra-inputs ignore_eos:true --request-rate {rate}"
        " --arrival-pattern poisson --request-count {requests} --random-seed {seed}"
        " --no-gpu-telemetry --no-server-metrics --ui-type none --artifact-dir {out}",
        result="profile_export.jsonl",
        distribution="aiperf",
        install="pip install aiperf",
        settings="https://github.com/ai-dynamo/aiperf#readme",
    ),
    "sglang": Peer(
        command="{python} -m sglang.bench_serving --backend sglang-oai-chat --base-url {url}"
        " --model mock --tokenizer {tokenizer} --dataset-name random-ids"
        " --random-input-len {input_tokens} --random-output-len {output_tokens}"
        " --random-range-ratio 1 --request-rate {rate} --num-prompts {requests} --seed {seed}"
        " --output-file {out}/result.jsonl --output-details --disable-tqdm",
        result="result.jsonl",
        program="sglang",
        distribution="sglang",
        install="pip install sglang",
        settings="https://docs.sglang.ai/developer_guide/bench_serving.html",
    ),
}
OURS = Peer(
    command="slobench run --target {url} --rate {rate}/s --input-len {input_tokens}"
    " --output-len {output_tokens} --warmup 0s --duration {seconds}s --seed {seed} --out {out}/run",
    result="run",
)


def read_settings(path: Path | None) -> dict[str, Peer]:
    """PEERS and slobench, changed and extended by a settings file. Raises UsageError with file and
    line."""
    known = {SLOBENCH: OURS, **PEERS}
    if path is None:
        return known
    try:
        text = read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    document = parse_document(text, str(path), UsageError)
    for name, value in document.values.items():
        base = known[name].model_dump() if name in known else {}
        if not isinstance(value, dict):
            document.note((name,), "expected keys: command, result")
            continue
        try:
            known[name] = Peer(**{**base, **value})
            words(known[name].command, dict.fromkeys(VALUES, ""))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                document.note((name, *detail["loc"]), detail["msg"])
        except UsageError as error:
            document.note((name, "command"), str(error))
    document.raise_mistakes()
    return known


def settings_text(peers: Mapping[str, Peer]) -> str:
    """The settings as a file that `read_settings` reads."""
    return write_document(
        {name: peer.model_dump(exclude_defaults=True) for name, peer in peers.items()}
    )


def words(command: str, values: Mapping[str, str]) -> list[str]:
    """The words of a command line, with values in place of their names. Raises UsageError for an
    unknown name and for unbalanced quotes."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UsageError(f"unknown value {match[0]}; {nearest(match[1], values)}")
        return values[match[1]]

    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{error}: {command}") from None
    if not parts:
        raise UsageError("an empty command")
    return [_NAME.sub(value, part) for part in parts]


def values_of(
    peer: Peer,
    *,
    url: str,
    rate_per_s: float,
    seconds: float,
    input_tokens: int,
    output_tokens: int,
    seed: int,
    tokenizer: Path,
    out: Path,
) -> dict[str, str]:
    """The values of VALUES for a run of a peer."""
    program = program_of(peer)
    return {
        "url": url,
        "rate": f"{rate_per_s:g}",
        "requests": str(max(1, round(rate_per_s * seconds))),
        "seconds": f"{seconds:g}",
        "input_tokens": str(input_tokens),
        "output_tokens": str(output_tokens),
        "seed": str(seed),
        "tokenizer": str(tokenizer.resolve()),
        "out": str(out.resolve()),
        "python": str(program.with_name("python") if program else sys.executable),
    }


def program_of(peer: Peer) -> Path | None:
    """The program of a peer on the PATH; None where it is not installed."""
    found = shutil.which(peer.needs)
    return None if found is None else Path(found)


def installed(peers: Mapping[str, Peer]) -> list[str]:
    """The names of those whose program is on the PATH."""
    return [name for name, peer in peers.items() if program_of(peer) is not None]


def version_of(peer: Peer, program: Path) -> str:
    """The version of its package, by the metadata next to the program; "" where there is none."""
    if not peer.distribution:
        return ""
    name = re.sub(r"[-_.]+", "_", peer.distribution).lower()
    home = program.resolve().parent.parent
    places: Sequence[Path] = [home, *home.glob("lib/python3*/site-packages")]
    for place in places:
        for info in place.glob(f"{name}-*.dist-info"):
            return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def word_tokenizer(folder: Path) -> Path:
    """Writes a tokenizer of 2 000 words into a new folder in `folder`, and returns that folder."""
    vocabulary = {"<unk>": 0} | {f"w{number}": number for number in range(1, 2000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    absent = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    content: dict[str, object] = {
        "version": "1.0",
        **dict.fromkeys(absent),
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": model,
    }
    home = folder / "tokenizer"
    home.mkdir(exist_ok=True)
    (home / "tokenizer.json").write_text(json.dumps(content))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (home / "tokenizer_config.json").write_text(json.dumps(kind))
    (home / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 2000}))
    return home
