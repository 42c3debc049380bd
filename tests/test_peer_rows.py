"""Rows of other load generators, joined with the log of the server."""

import sys

import numpy as np
from rig import clients, peers


def test_rows_of_a_peer_are_joined_in_the_order_of_their_sends():
    result = {"start_times": [0.3, 0.1, 0.2], "ttfts": [0.053, 0.0501, 0.051]}
    wrong_ms = peers.errors_ms(peers.PEERS["vllm-rs"], result, np.array([50.0, 50.0, 50.5]))
    np.testing.assert_allclose(wrong_ms, [0.1, 1.0, 2.5], atol=1e-9)


def test_a_peer_without_rows_of_all_requests_has_no_errors_per_request():
    rows = {"start_times": [0.1], "ttfts": [0.05]}
    for name, result in (("vllm-rs", rows), ("vllm-rs", {}), ("guidellm", rows)):
        assert len(peers.errors_ms(peers.PEERS[name], result, np.array([50.0, 51.0]))) == 0


def test_a_command_has_its_own_cpu_time_and_the_waits_at_both_ends():
    code = "import sys; sum(range(3_000_000)); print('out'); print('err', file=sys.stderr); exit(3)"
    done = clients.finished([sys.executable, "-c", code], {})
    assert (done.exit_code, done.output) == (3, "out\nerr\n")
    assert 0 < done.cpu_s <= done.ended_s - done.started_s
    command = clients.Finished("", 0, 1.0, 10.0, started_s=5.0, ended_s=9.0)
    log_ns = np.array([6_000_000_000, 5_500_000_000]), np.array([7_000_000_000, 8_750_000_000])
    assert clients.waits_s(command, *log_ns) == (0.5, 0.25)
