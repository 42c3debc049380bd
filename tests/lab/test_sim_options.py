"""The settings of a simulated engine: flat keys, blocks, and the rules of each block."""

import pytest

from loadgen.errors import UsageError
from loadgen.lab.sim_options import SimOptions, sim_options
from loadgen.lab.simulate import SimTarget
from loadgen.lab.simulated_engine import make_policy

CLUSTER = {
    "host_memory": "2e9",
    "host_latency": "2ms",
    "replicas": "2",
    "router": "jsq",
    "rebalance": "1s",
    "kv_factor": "0.5",
    "token_budget": "64",
    "watermark": "0.1",
}


def test_no_key_is_in_two_blocks():
    keys = list(SimOptions.all_keys())
    assert len(keys) == len(set(keys))
    assert {"mode", "kv_blocks", "replicas", "fail", "startup", "split", "policy_args"} < set(keys)
    assert not {"memory", "cluster", "failures", "placement"} & set(keys)


def test_a_setting_is_in_its_block_whatever_the_others_are():
    options = sim_options(CLUSTER)
    assert (options.memory.host_memory, options.memory.host_latency) == (2e9, 0.002)
    assert (options.cluster.replicas, options.cluster.router) == ("2", "jsq")
    assert options.cluster.migration.rebalance == 1.0
    assert options.cluster.links.kv_factor == 0.5
    assert options.token_budget == 64
    assert options.policy_args == {"watermark": "0.1"}


def test_the_given_settings_are_read_back_as_the_same_options():
    options = sim_options(CLUSTER)
    assert sim_options(options.given()) == options
    assert options.given().keys() == {*CLUSTER, "policy_args"} - {"watermark"}


def test_the_manifest_lists_the_given_settings_as_they_are_written():
    options = sim_options(CLUSTER)
    flags = SimTarget(options, make_policy(options)).to_manifest().labels.flags
    assert flags == (
        "mode=chunked token_budget=64 host_memory=2000000000.0 host_latency=2ms replicas=2 "
        "router=jsq kv_factor=0.5 rebalance=1s watermark=0.1"
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_memory": 1e9, "swap_blocks": 9}, "host_memory: leave out swap_blocks"),
        ({"split": "50%", "role": "prefill"}, "split: not simulated together with pipeline or"),
        ({"replicas": "1:split=50%+1", "rebalance": "1s"}, "split: role, rebalance, failures"),
        ({"replicas": "1+1:pipeline=2;async_depth=1"}, "async_depth: a pipeline plans ahead"),
        ({"replicas": "1+1:split=50%", "mtbf": "1h"}, "split: role, rebalance, failures"),
        ({"replicas": 2, "fail": "3@1s:1s"}, "fail: there is no replica 3; known: 1 to 2"),
        ({"target_requests": 8, "min_replicas": 2}, "min_replicas: 2 is more than the 1 of"),
        ({"replicas": 2, "link_latency": "1ms"}, "link_latency: has no effect, because no KV"),
        ({"host_latency": "2"}, "host_latency: '2' is not a duration"),
        ({"role": "prefil"}, "role: unknown value 'prefil'; did you mean 'prefill'"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_before_an_engine_is_built(settings, message):
    with pytest.raises(UsageError) as caught:
        sim_options(settings)
    assert str(caught.value).startswith(message)


def test_parameters_of_the_mode_do_not_reach_a_group_with_another_mode():
    options = sim_options({"watermark": "0.1", "replicas": "1+1:mode=static+1:hardware=h100"})
    kinds = [(each.mode, each.policy_args) for each in options.each_replica()]
    own = {"watermark": "0.1"}
    assert kinds == [("chunked", own), ("static", {}), ("chunked", own)]


@pytest.mark.parametrize(
    ("settings", "n_gpus"),
    [
        ({}, 1),
        ({"hardware": "4xh200", "replicas": 2}, 8),
        ({"hardware": "2xh200", "pipeline": 3}, 6),
        ({"replicas": "2+3:hardware=2xa100;pipeline=4+1:split=50%"}, 27),
        ({"hardware": "8xmy_gpu.yaml"}, 8),
    ],
)
def test_the_gpus_of_all_replicas_are_counted(settings, n_gpus):
    assert sim_options(settings).n_gpus == n_gpus
