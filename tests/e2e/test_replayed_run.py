"""A real server under load, its log replayed: the scheduler decides the same without it."""

import asyncio
import contextlib
import itertools
import json
import random
import subprocess
import sys

import aiohttp
import pyarrow.parquet as pq
import pytest

from loadgen.archive import checksums
from loadgen.lab.engine_log import replay
from reference_engine.step_log.step_files import EVENTS, STEPS

pytestmark = pytest.mark.e2e


def serve(log_dir, *flags):
    command = [sys.executable, "-m", "reference_engine", "--port=0", "--device=toy", "--shape=nano"]
    command.append("--operator=open")
    return subprocess.Popen(
        [*command, "--kv-blocks=60", "--max-num-seqs=6", "--max-model-len=512", "--log-level=full",
         f"--log-dir={log_dir}", "--set=step_s=0.001", "--set=eos_every=40", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


async def one(session, draw):
    """A proper request, one that is cut at a stop string, or one whose client leaves."""
    body = {
        "prompt": "once upon a time " * draw.randrange(1, 8) + str(draw.randrange(9)),
        "max_tokens": draw.randrange(1, 40), "tenant": draw.choice("ab"),
        "priority": draw.randrange(-1, 2), "ttft_slo_ms": draw.choice((5, 500)),
        "stream": True, "stop": draw.choice((None, ["a", "Q"])), "temperature": 0,
    }  # fmt: skip
    await asyncio.sleep(draw.random() * 0.5)
    with contextlib.suppress(asyncio.TimeoutError):
        timeout = aiohttp.ClientTimeout(total=draw.choice((None, None, 0.05)))
        async with session.post("/v1/completions", json=body, timeout=timeout) as response:
            await response.read()


async def leave(session):
    """Closes connections after the first token of a long answer, until the engine has not got to
    the end of one. At 200 steps of a millisecond only a machine that stands still needs a second.
    """
    state = ""
    for attempt in itertools.count():
        name = f"left-{attempt}"
        body = {"prompt": "long", "max_tokens": 200, "ignore_eos": True, "stream": True}
        headers = {"x-request-id": name}
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            await response.content.readline()
            response.close()
        while not state.startswith("finished"):
            async with session.get(f"/debug/requests/{name}") as response:
                state = (await response.json())["state"]
        if state == "finished_abort":
            return
        state = ""


async def load(url, switch_to, seed):
    draw = random.Random(seed)
    async with aiohttp.ClientSession(url) as session:
        await leave(session)
        body = {"prompt": "short", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
        async with session.post("/v1/completions", json=body) as response:  # a step for each token
            assert response.status == 200
        asked = [asyncio.create_task(one(session, draw)) for _ in range(60)]
        for mode in switch_to:
            async with session.put("/debug/policy", json={"mode": mode}) as response:
                assert response.status == 200
            async with session.post("/debug/tenants/a/pause") as response:
                assert response.status == 200
            async with session.post("/v1/estimate", json={"prompt": "x"}) as response:
                assert response.status == 200
            async with session.post("/debug/tenants/a/resume") as response:
                assert response.status == 200
        await asyncio.gather(*asked)


STREAMED = ["--mode=static", "--set=fill_timeout=20ms", "--set=answers=streamed"]
"""A client leaves after its first token."""


@pytest.mark.parametrize(
    ("flags", "switch_to"),
    [
        (["--mode=chunked", "--set=token_budget=40"], []),
        (["--mode=sjf", "--async-depth=1", "--swap-blocks=30"], ["mlfq", "token_fair", "deadline"]),
        (STREAMED, ["bucketed", "smdp_table", "priority"]),
    ],
)
def test_a_live_log_is_decided_again_identically(tmp_path, flags, switch_to):
    process = serve(tmp_path, *flags)
    try:
        url = process.stdout.readline().split()[-1]
        asyncio.run(load(url, switch_to, seed=5))
    finally:
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    found = replay(tmp_path)
    assert found.is_identical, found.sentence()
    assert found.n_steps == pq.read_metadata(tmp_path / STEPS).num_rows > 100
    kinds = pq.read_table(tmp_path / EVENTS)["kind"].to_pylist()
    assert kinds[0] == "start"
    assert {"arrival", "finish", "cancel"} <= set(kinds)
    assert kinds.count("switch_policy") == len(switch_to)


def test_a_run_is_replayed_from_the_command_line(cli, tmp_path):
    flags = ["--rate=30/s", "--input-len=90", "--output-len=12", "--duration=2s", "--slo=ttft<=30s"]
    engine = "--engine=device=toy,shape=nano,mode=sjf,log_level=full"
    result = cli(
        "run", "--target=reference", engine, *flags, *cli.lenient, "--out=run", cwd=tmp_path
    )
    assert result.returncode == 0, result.stdout + result.stderr
    result = cli("simulate", "--replay=run", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("identical: ")
    told = json.loads(cli("simulate", "--replay=run", "--json", cwd=tmp_path).stdout)
    assert (told["identical"], told["difference"], told["n_open"]) == (True, None, 0)
    assert cli("simulate", "quickstart", "--replay=run", cwd=tmp_path).returncode == 2
    # A decision that was not made: one token more for somebody in the last step.
    steps = pq.read_table(tmp_path / "run" / STEPS)
    context = steps["context_tokens"].to_pylist()
    context[-1] += 1
    at = steps.schema.get_field_index("context_tokens")
    changed = steps.set_column(at, steps.schema.field(at), [context])
    pq.write_table(changed, tmp_path / "run" / STEPS)
    checksums.cover(tmp_path / "run", tmp_path / "run" / STEPS)
    result = cli("simulate", "--replay=run", cwd=tmp_path)
    assert result.returncode == 1
    assert f"step {len(context) - 1}: context_tokens was {context[-1]}" in result.stdout


def test_what_cannot_be_replayed_says_what_to_do(cli, tmp_path):
    result = cli("simulate", f"--replay={tmp_path}", cwd=tmp_path)
    assert result.returncode == 2
    assert "log_level=full" in result.stderr
