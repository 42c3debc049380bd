"""Rows of other load generators, joined with the log of the server."""

import numpy as np
from rig import clients, peers

from loadgen.foreign.build import Origin, build
from loadgen.foreign.foreign_run import JsonValue
from loadgen.foreign.vllm import read_vllm
from loadgen.studies.demo.bounded_command import Finished
from tests.foreign.results import vllm_rs


def test_rows_of_a_peer_are_joined_in_the_order_of_their_sends():
    ttfts_s = [0.053, 0.0501, 0.051, 0.0]  # the server refused the last
    content = vllm_rs(start_times=[0.3, 0.1, 0.2, 0.4], ttfts=ttfts_s)
    (found,) = read_vllm([JsonValue(content, 1)], "result.json")
    run = build(found, "result", Origin("result.json", "0" * 64, (), "1"))
    wrong_ms = peers.errors_ms(run, np.array([50.0, 50.0, 50.5]))
    np.testing.assert_allclose(wrong_ms, [0.1, 1.0, 2.5], atol=1e-9)


def test_a_command_has_the_waits_at_both_ends():
    command = Finished("", 0, 1.0, 10.0, started_s=5.0, ended_s=9.0)
    log_ns = np.array([6_000_000_000, 5_500_000_000]), np.array([7_000_000_000, 8_750_000_000])
    assert clients.waits_s(command, *log_ns) == (0.5, 0.25)
