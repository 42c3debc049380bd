"""Checks of the GPU executor on any device: graphs against launches, delayed copies, swap with
shared prefixes, HTTP, builds in turn, and an error in the middle of a run.

Not collected by itself: `test_device_cases.py` runs it on the CPU at a small size, `tests/gpu` on a
device. `Device` holds what differs.
"""

from __future__ import annotations

import gc
import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reference_engine.executors.base import Site
from reference_engine.executors.cuda_stream import DeviceStream
from reference_engine.executors.torch_cuda import TorchCuda, TorchCudaExecutor, buckets
from reference_engine.executors.torch_memory import HostKv
from reference_engine.kernels.kv_memory import Kv
from reference_engine.kernels.ops import Kernels, ops
from reference_engine.kernels.tiles import planned
from reference_engine.model.paged import PagedLlama
from reference_engine.model.zoo import resolve
from reference_engine.state.batch import Copy, StepBatch
from reference_engine.state.model_config import KvDtype, ModelConfig, ModelSource
from reference_engine.state.plan import How
from reference_engine.state.sequence import Request
from tests.reference_engine.engine_kit import Rig, request, rig
from tests.reference_engine.margin import lively_weights, shortfalls

MARGIN = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # as in tests/gpu/test_engine_on_gpu.py
N_OUTPUT = 24


@dataclass(frozen=True)
class Device:
    """A device by its stream, with the kernels, the dtype, and the executor's arguments for
    them."""

    stream: DeviceStream
    kernels: Kernels
    dtype: torch.dtype

    @property
    def arguments(self) -> dict[str, object]:
        name = str(self.dtype).removeprefix("torch.")
        return {"on": self.stream.device.type, "kernels": self.kernels, "dtype": name}


def graph_shortfalls(device: Device, config: ModelConfig, max_rows: int, least: int) -> list[float]:
    """For each bucket from `least` rows on: decode steps of as many rows and of a row less, at
    unequal contexts, by the graph and launched kernel by kernel on the same KV. Returns the
    shortfall of each token of the graph by the logits of the launches."""
    model = PagedLlama(
        config,
        lively_weights(config, device.dtype, device.stream.device),
        ops(device.kernels),
        16,
        256,
    )
    width, site = 16, _site(config, 16 * max_rows, max_rows)
    executor = TorchCuda(model, ops(device.kernels), site, 16 * max_rows, device.stream)
    generator = torch.Generator().manual_seed(5)
    for layer in model.cache.numbers:
        layer.copy_(torch.randn(layer.shape, generator=generator))
    requests = [_decoding(i, 1 + 37 * i % 240, width) for i in range(max_rows)]
    shorts: list[float] = []
    for bucket in buckets(max_rows):
        for n in (bucket, bucket - 1):
            if n < least:
                continue
            batch = StepBatch(decodes=requests[:n])
            tokens = list(executor.execute(batch).tokens)
            launched = list(executor._compute(batch)().tokens)
            logits = executor._logits[:n].double()
            chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).view(-1, 1))
            shorts += ((logits.amax(1) - chosen.squeeze(1)) / logits.std(1)).tolist()
            differing = sum(a != b for a, b in zip(tokens, launched, strict=True))
            assert differing <= n // 4, f"{differing} of {n} tokens differ"
    return shorts


def _decoding(i: int, context: int, width: int) -> Request:
    tokens = [(31 * i + 7 * k) % 256 for k in range(context + 1)]
    blocks = list(range(i * width, (i + 1) * width))
    return request(f"r{i}", tokens, 8, blocks=blocks, n_computed=context)


def _site(config: ModelConfig, n_blocks: int, max_rows: int) -> Site:
    return Site(
        ModelSource("case", config), n_blocks, 16, 256, lambda s: None, max_num_seqs=max_rows
    )


def prompts() -> list[Request]:
    """Prompts of many lengths; the last three share 48 tokens."""
    sizes = (1, 5, 16, 17, 33, 64, 90)
    out = [
        request(f"r{i}", [(7 * i + 3 * j) % 256 for j in range(n)], N_OUTPUT)
        for i, n in enumerate(sizes)
    ]
    shared = [(5 * j + 1) % 256 for j in range(48)]
    return out + [request(f"s{i}", [*shared, i, i + 1], N_OUTPUT) for i in range(3)]


def answers(built: Rig) -> list[Request]:
    """The requests of `prompts` with their tokens; one arrives each step."""
    requests = prompts()
    for req in requests:
        built.admit(req)
        built.step()
    built.drain()
    return requests


def delayed_answers(device: Device, delay: Callable[[], None], how: How) -> list[list[int]]:
    """Tokens with a delay on the device before and after each launch: copies and kernels that are
    not ordered by the stream would read memory too early."""
    engine = rig(
        executor="torch_cuda", executor_args=device.arguments, n_blocks=12, max_model_len=144,
        token_budget=48, n_host_blocks=40, how=how, async_depth=1, max_num_seqs=8,
    )  # fmt: skip
    inner: Any = engine.executor

    class Delayed:
        caps = inner.caps

        def execute(self, batch):
            return self.launch(batch)()

        def can_launch_ahead(self, batch):
            return inner.can_launch_ahead(batch)

        def launch(self, batch):
            delay()
            wait = inner.launch(batch)
            delay()
            return wait

    engine.executor = Delayed()
    tokens = [req.tokens for req in answers(engine)]
    assert engine.state.counters.preemptions > 0
    return tokens


def check_swap_with_shared_prefixes(device: Device, kv_dtype: KvDtype) -> None:
    """Greedy tokens stay near the likeliest while blocks are shared, swapped out and back in."""
    engine = rig(
        executor="torch_cuda", executor_args=device.arguments | {"kv_dtype": kv_dtype},
        n_blocks=12, max_model_len=144, token_budget=48, n_host_blocks=40, how=How.swap,
        async_depth=1, max_num_seqs=8,
    )  # fmt: skip
    requests = answers(engine)
    counters = engine.state.counters
    assert counters.swaps > 0
    assert counters.cached_tokens > 0
    for req in requests:
        assert req.n_output == N_OUTPUT
        short = shortfalls(resolve("nano").config, device.dtype, req.tokens, req.n_prompt)
        assert max(short) <= 2 * MARGIN[device.dtype], f"{req.id}: {short}"


def check_builds_in_turn(device: Device, used_bytes: Callable[[], int], n: int = 10) -> None:
    """Builds and drops an executor `n` times; after the first two, no memory is added."""
    used = []
    for _ in range(n):
        kind = TorchCudaExecutor.model_validate(device.arguments)
        built = kind.build(Site(resolve("tiny"), 64, 16, 256, time.sleep, 0, 16, 128))
        built.execute(StepBatch(decodes=[_decoding(0, 20, 4)]))
        del built
        gc.collect()  # a graph refers to its executor
        used.append(used_bytes())
    assert max(used[2:]) <= 1.02 * used[1], used


def check_top_blocks(device: Device, n_blocks: int) -> None:
    """Writes and reads the last blocks of a layer's KV, as the first blocks of a small memory, and
    swaps them."""
    n_kv, head_dim, n_top, chosen = 8, 128, 4, ops(device.kernels)
    where, dtype = device.stream.device, device.dtype
    generator = torch.Generator().manual_seed(2)
    shape = (2, n_kv, 16, head_dim)
    small = Kv(torch.randn(n_top, *shape, generator=generator).to(where, dtype))
    large = Kv(torch.zeros(n_blocks, *shape, device=where, dtype=dtype))
    first = n_blocks - n_top
    large.numbers[first:] = small.numbers
    table = torch.arange(n_top, dtype=torch.int32, device=where).view(1, -1)
    row = torch.zeros(1, dtype=torch.int32, device=where)
    context = torch.full_like(row, 50)
    q = torch.randn(1, 2 * n_kv, head_dim, generator=generator).to(where, dtype)
    work = planned([50], 2, where)
    read = [
        chosen.decode_attention(q, cache, blocks, row, context, work)
        for cache, blocks in ((small, table), (large, table + first))
    ]
    assert torch.equal(*read)
    qkv = torch.randn(3, 4 * n_kv * head_dim, generator=generator).to(where, dtype)
    at = torch.arange(3, dtype=torch.int32, device=where)
    rotary = (torch.ones(4, head_dim, device=where), torch.zeros(4, head_dim, device=where))
    for cache, slots in ((small, at + 60), (large, at + 60 + 16 * first)):
        chosen.rope_write(qkv, at, slots, rotary, None, 1e-5, cache)
    assert torch.equal(small.numbers, large.numbers[first:])
    assert not large.numbers[: min(first, 4)].any()
    # Out to the host, in another order back in.
    layers, host = Kv(large.numbers.unsqueeze(0)), n_top - 1
    before = large.numbers[first:].clone()
    swapped = HostKv(layers, n_top, device.stream.is_pinning)
    swapped.copy_blocks([Copy(first + i, i, is_out=True) for i in range(n_top)], layers)
    large.numbers[first:] = 0
    swapped.copy_blocks([Copy(first + i, host - i, is_out=False) for i in range(n_top)], layers)
    assert torch.equal(large.numbers[first:], before.flip(0))
    assert not large.numbers[: min(first, 4)].any()


def check_tokens_through_http(device: Device, flags: list[str]) -> None:
    """Greedy answers of a server process, all requests at once, equal those of an engine in this
    process. Its text has a character per token; the tokens of float32 do not depend on the
    batch."""
    texts = ["abc", "a longer prompt of the same engine", "x" * 50]
    engine = rig(
        executor="torch_cuda", executor_args=device.arguments, n_blocks=64, max_model_len=256,
        max_num_seqs=8,
    )  # fmt: skip
    requests = [request(t, list(t.encode()), 12) for t in texts]
    engine.admit(*requests)
    engine.drain()
    with _Server(flags) as server:
        for text, req in zip(texts, requests, strict=True):
            status, answer = server.complete(prompt=text, max_tokens=12, temperature=0)
            assert status == 200
            letters = server.letters(req.output)
            assert answer["choices"][0]["text"] == letters


def check_error_in_a_run(plugin: Path, flags: list[str], message: str) -> None:
    """A mode of `plugin` fails in the 20th step: its stream gets an error event with the message,
    a later request the status 500, `/health` too, and the server ends with exit code 4."""
    with _Server([*flags, "--plugin", str(plugin), "--mode", "breaking"]) as server:
        lines = server.stream(prompt="abc", max_tokens=100, temperature=0)
        errors = [json.loads(line[6:]) for line in lines if '"error"' in line]
        assert message in errors[0]["error"]["message"]
        status, answer = server.complete(prompt="abc", max_tokens=3)
        assert status == 500
        assert message in answer["error"]["message"]
    assert server.exit_code == 4


class _Server:
    """The engine's server in a process of its own, ended by SIGTERM; `exit_code` is set then."""

    def __init__(self, flags: list[str]) -> None:
        self._command = [sys.executable, "-m", "reference_engine", "--port", "0", *flags]

    def __enter__(self) -> _Server:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("READY "), line
        self._port = int(line.rsplit(":", 1)[1])
        return self

    def __exit__(self, *error: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()

    def complete(self, **body: object) -> tuple[int, dict[str, Any]]:
        status, text = self._post({**body, "ignore_eos": True})
        return status, json.loads(text)

    def stream(self, **body: object) -> list[str]:
        _, text = self._post({**body, "ignore_eos": True, "stream": True})
        return [line for line in text.split("\n") if line.startswith("data: ")]

    def letters(self, tokens: list[int]) -> str:
        from reference_engine.state.tokenizer import ByteTokenizer

        detokenizer = ByteTokenizer(printable=True).detokenizer()
        return "".join(map(detokenizer.push, tokens)) + detokenizer.flush()

    def _post(self, body: dict[str, object]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(body),
                {"Content-Type": "application/json"},
            )
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()
