"""The calls to CUDA and their order, recorded by a stand-in."""

from __future__ import annotations

import pytest

from loadgen.errors import UsageError
from reference_engine.executors.base import Site
from reference_engine.model.zoo import resolve
from reference_engine.state.batch import StepBatch
from reference_engine.state.plan import How
from tests.reference_engine.cuda_stand_in import StandIn
from tests.reference_engine.engine_kit import request, rig

torch = pytest.importorskip("torch", reason="torch is not installed")

from reference_engine.executors.cuda_stream import CudaStream  # noqa: E402 - only with torch
from reference_engine.executors.torch_cuda import TorchCuda, _measured_blocks  # noqa: E402
from reference_engine.kernels.ops import PLAIN  # noqa: E402
from reference_engine.model.paged import PagedLlama  # noqa: E402
from reference_engine.model.weights import random_weights  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def stream():
    return CudaStream(CPU, StandIn())


def test_a_graph_is_captured_after_a_trial_on_another_stream(stream):
    def work():
        stream._cuda.calls.append("work")
        return torch.ones(2)

    stream._cuda.calls.clear()
    replay, result = stream.capture(work)
    assert stream._cuda.calls == [
        "side waits for own", "on side", "work", "off side", "own waits for side",
        "capture into pool on side", "work", "captured",
    ]  # fmt: skip
    replay()
    assert stream._cuda.calls[-1] == "replay"
    assert result.tolist() == [1, 1]


def test_all_graphs_come_from_one_stream_also_those_of_another_build(stream):
    """A library keeps a workspace for each stream that it was called on, up to 32 MiB."""
    for _ in range(20):
        stream.capture(lambda: torch.ones(2))
    CudaStream(CPU, stream._cuda).capture(lambda: torch.ones(2))
    assert stream._cuda.calls.count("a stream") == 1


def test_the_end_of_a_step_is_an_event(stream):
    stream._cuda.calls.clear()
    wait = stream.record()
    assert stream._cuda.calls == ["record"]
    wait()
    assert stream._cuda.calls == ["record", "synchronize"]


def test_a_stream_has_the_properties_of_its_gpu(stream):
    assert (stream.gpu, stream.n_processors, stream.is_pinning) == ("GPU-4f5e", 132, False)
    assert stream._cuda.calls == ["enter cpu", "a stream"]


def test_kv_gets_the_memory_left_by_other_programs_and_the_largest_step(stream):
    """0.9 of 8 GiB, less 1 of other programs (8 − 4 free − 3 ours), 2 of the step, 2 of reserve."""
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 64)
    site = Site(resolve("nano"), 0, 16, 64, lambda s: None, 0, 2, 32)
    n_blocks = _measured_blocks(model, PLAIN, site, stream, 0.9)
    assert n_blocks == 288_358  # 2.2 GiB of 8 KiB
    assert stream._cuda.calls[-2:] == ["peak", "empty the cache"]
    assert model.cache.numbers.shape[1] == 0  # the trial's memory was released


def test_the_measured_step_has_special_requests_in_every_row(stream):
    """Each of 3 rows is sampled, and sampled again with a ban and truncation."""
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 64)
    sampled = []

    def sample(logits, temperatures, keys):
        sampled.append(logits)
        return PLAIN.sample(logits, temperatures, keys)

    chunked: list[int] = []

    def chunk_attention(q, *others):
        chunked.append(len(q))
        return PLAIN.chunk_attention(q, *others)

    chosen = PLAIN._replace(sample=sample, chunk_attention=chunk_attention)
    model._ops = chosen
    site = Site(resolve("nano"), 0, 16, 64, lambda s: None, 0, 3, 32)
    _measured_blocks(model, chosen, site, stream, 0.9)
    assert [len(logits) for logits in sampled] == [3, 3]
    assert (sampled[1] == float("-inf")).sum(1).tolist() == [1, 1, 1]
    assert chunked == [29, 29]  # in each of two layers


def test_a_largest_step_beyond_the_memory_is_an_error_of_its_limits():
    class Full(StandIn):
        def reset_peak_memory_stats(self, device):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 64)
    site = Site(resolve("nano"), 0, 16, 64, lambda s: None, 0, 2, 32)
    with pytest.raises(UsageError) as error:
        _measured_blocks(model, PLAIN, site, CudaStream(CPU, Full()), 0.9)
    assert str(error.value) == (
        "max_num_seqs: a step of 2 requests and 32 tokens does not fit next to the weights; lower "
        "max_num_seqs or the token budget: CUDA out of memory. Tried to allocate 9 GiB"
    )


def test_every_kind_of_step_makes_its_calls(stream):
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 144)
    site = Site(resolve("nano"), 9, 16, 144, lambda s: None, 40, 4)
    engine = rig(n_blocks=9, max_model_len=144, n_host_blocks=40, how=How.swap, async_depth=1)
    engine.executor = TorchCuda(model, PLAIN, site, 9, stream)
    assert stream._cuda.calls.count("captured") == 3  # 1, 2 and 4 rows
    requests = [request(f"r{i}", range(1, 40 + i), 12) for i in range(3)]
    engine.admit(*requests)
    engine.drain()
    calls = stream._cuda.calls
    assert calls.count("record") == calls.count("synchronize") > 12
    assert calls.count("replay") > 8
    assert engine.state.counters.swaps > 0
    assert [req.n_output for req in requests] == [12, 12, 12]


def test_an_empty_step_makes_no_calls(stream):
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 64)
    site = Site(resolve("nano"), 4, 16, 64, lambda s: None, 0, 1)
    executor = TorchCuda(model, PLAIN, site, 4, stream, has_graphs=False)
    stream._cuda.calls.clear()
    assert executor.execute(StepBatch()).tokens == ()
    assert stream._cuda.calls == ["enter cpu"]


def test_an_empty_step_leaves_the_memory_of_a_running_step_alone(stream):
    """Two steps have memory of their own; with a third in between they would share it."""
    config = resolve("nano").config
    model = PagedLlama(config, random_weights(config, 0), PLAIN, 16, 64)
    site = Site(resolve("nano"), 4, 16, 64, lambda s: None, 0, 1)
    executor = TorchCuda(model, PLAIN, site, 4, stream)
    req = request("a", range(5), 9, blocks=[0], n_computed=4)
    executor.launch(StepBatch(decodes=[req]))
    side = executor._side
    executor.launch(StepBatch())
    executor.launch(StepBatch(decodes=[req]))
    assert executor._side != side
