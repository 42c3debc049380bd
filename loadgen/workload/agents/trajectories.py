"""Trajectories of lengths and tool times, a line of JSON each, as tpu-inference replays them.

Source: github.com/vllm-project/tpu-inference, `benchmark_agentic.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from loadgen.errors import TraceFileError
from loadgen.workload.agents.corpus import Notes, RecordedTree
from loadgen.workload.agents.trees import RecordedRequest, grow_streams
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.json_lines import line_of_record, read_records

_BLOCK_TOKENS = 16
_TOKEN_S = 0.02  # per output token, where nothing states the time of an answer


class _Trajectory(msgspec.Struct, gc=False):
    """A first prompt of `prompt_len` tokens; turn k answers with `out_lens[k]`, then a tool takes
    `tool_times[k]` seconds and adds `obs_lens[k]` tokens."""

    group: str | int
    prompt_len: int
    out_lens: Sequence[int]
    obs_lens: Sequence[int]
    tool_times: Sequence[float]
    stream: str | int = 0


def is_trajectories(content: bytes) -> bool:
    """Whether a file begins like such lines."""
    head = content[: 1 << 16]
    return b'"out_lens"' in head and b'"prompt_len"' in head


def read_trajectories(content: bytes, source: str, notes: Notes) -> Iterator[RecordedTree]:
    """A tree for each group of the file, in order of its first line. Raises TraceFileError with
    `source:line: reason` for any other content."""
    groups: dict[str | int, list[_Trajectory]] = {}
    row = 0
    for batch in read_records(content, source, _Trajectory):
        for own in batch:
            if problem := _problem(own):
                raise TraceFileError(f"{source}:{line_of_record(content, row)}: {problem}")
            groups.setdefault(own.group, []).append(own)
            row += 1
    for name, streams in groups.items():
        notes.add(
            f"trees whose answers have no times, estimated at {1 / _TOKEN_S:g} tokens per second"
        )
        yield _tree(f"{source}:{name}", streams)


def _problem(own: _Trajectory) -> str:
    """The mistake of a trajectory, "" without any."""
    n, lists = len(own.out_lens), (own.obs_lens, own.tool_times)
    if not n:
        return "out_lens: expected an answer at least"
    if any(len(values) not in (n, n - 1) for values in lists):
        return f"obs_lens and tool_times: expected {n - 1} or {n} values each, for {n} answers"
    if own.prompt_len < 1 or min(own.out_lens) < 1 or min(own.obs_lens, default=0) < 0:
        return "prompt_len, out_lens and obs_lens: expected numbers of tokens"
    if not all(0 <= time_s < np.inf for time_s in own.tool_times):
        return "tool_times: expected seconds"
    if own.prompt_len + sum(own.out_lens) + sum(own.obs_lens) > MAX_TOKENS:
        return f"more than {MAX_TOKENS} tokens of context"
    return ""


def _tree(name: str, streams: Sequence[_Trajectory]) -> RecordedTree:
    """The streams of a group begin together and share the full blocks of their first prompts."""
    found: list[tuple[RecordedRequest, int, int]] = []
    for number, own in enumerate(streams):
        n_shared = own.prompt_len // _BLOCK_TOKENS
        at_s, n_in, base = 0.0, own.prompt_len, (number + 1) << 32
        for turn, n_out in enumerate(own.out_lens):
            ids = np.arange(n_in // _BLOCK_TOKENS, dtype=np.int64)
            ids[n_shared:] += base
            end_s = at_s + n_out * _TOKEN_S
            found.append((RecordedRequest(at_s, end_s, "", ids, number), n_in, n_out))
            if turn + 1 < len(own.out_lens):
                at_s, n_in = end_s + own.tool_times[turn], n_in + n_out + own.obs_lens[turn]
    found.sort(key=lambda each: each[0].start_s)
    tokens = np.array([(n_in, n_out) for _, n_in, n_out in found], np.int64)
    requests = [request for request, _, _ in found]
    return RecordedTree(name, requests, (), tokens, _BLOCK_TOKENS, grow_streams)
