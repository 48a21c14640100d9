"""``[deployment.decode]``: from a file to two sides, and who refuses them."""

from __future__ import annotations

import pytest

from lengthwise import backend, config
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.usecases import kv, simulate
from lengthwise.usecases.explain import explain
from lengthwise.usecases.variants import build

TEXT = """
[workload]
preset = "chat-1m"
request_rate = 2.0
num_requests = 40
[deployment]
model = "llama-3.1-8b"
gpu = "H100"
replicas = 2
decode = { tp = 2, max_num_seqs = 64, %s }
[engine]
max_model_len = 4096
[run]
model_draws = 0
"""


def reported(more='router = "least_outstanding"'):
    return config.loads(TEXT % more)


def test_a_file_describes_both_sides():
    complete = build(reported())[0].deployment
    assert (complete.parallel.tp, complete.parallel.replicas, complete.decode.parallel.tp) == (1, 2, 2)
    assert complete.gpus == 4
    assert complete.decode.limits.max_num_seqs == 64
    assert complete.decode.limits.max_num_batched_tokens == complete.limits.max_num_batched_tokens
    assert complete.decode.router == "least_outstanding"


def test_links_and_seconds_of_a_kv_transfer():
    node = build(reported())[0].deployment
    host = build(reported('link = "host", kv_transfer = "2ms", one_at_a_time = false'))[0].deployment
    kv_bytes = 2 * 32 * 8 * 128 * 2  # keys and values, layers, KV heads, dimensions, bytes
    assert node.decode.kv_transfer.bytes_per_token == kv_bytes, "one GPU sends what two receive"
    assert node.decode.kv_transfer.bytes_per_s == node.node.link_for(3).bandwidth_bytes_per_s
    assert host.decode.kv_transfer.bytes_per_token == kv_bytes * 1.5
    assert host.decode.kv_transfer.fixed_s == 0.002
    assert not host.decode.kv_transfer.one_at_a_time
    assert node.decode.kv_transfer.one_at_a_time


def test_the_effective_settings_load_again():
    complete = reported()
    assert config.loads(complete.to_toml()).deployment == complete.deployment


def test_a_run_reports_both_sides():
    outcome = simulate.run(reported())[0]
    hardware = outcome.summary.hardware
    assert outcome.summary.counts.finished == 40
    assert len(hardware.replica_busy_share) == 3
    assert 0 < hardware.kv_utilization.value < 1
    assert sum(share.value for share in hardware.time_shares.values()) == pytest.approx(1.0)


def test_unsupported_uses_of_a_decode_side_are_refused():
    variant = build(reported())[0]
    with pytest.raises(InputError, match="takes no decode side yet"):
        backend.vllm_launch(variant.deployment)
    with pytest.raises(InputError, match="kv takes no decode side yet"):
        kv.study(variant)


def test_the_decode_side_has_the_parallelism_of_the_prefill_side_unless_it_gives_its_own():
    text = TEXT.replace("replicas = 2\n", "tp = 4\n").replace("decode = { tp = 2, max_num_seqs = 64, %s }", "%s")
    assert build(config.loads(text % "decode.replicas = 2"))[0].deployment.decode.parallel == Parallelism(4, 1, 2)
    assert build(config.loads(text % "decode.tp = 2"))[0].deployment.decode.parallel == Parallelism(2)
    assert build(config.loads(text % "disaggregate = true"))[0].deployment.decode.parallel == Parallelism(4)
    both = build(config.loads(text % "disaggregate = false\ndecode.tp = 2"))[0].deployment
    assert both.decode is None
    assert both.gpus == 4


def test_sides_that_share_no_node_transfer_over_the_network():
    near, far = build(reported())[0].deployment, build(reported("replicas = 5"))[0].deployment
    assert far.gpus > far.node.gpus >= near.gpus
    assert near.decode.kv_transfer.bytes_per_s == near.node.link.bandwidth_bytes_per_s
    assert far.decode.kv_transfer.bytes_per_s == far.node.network.bandwidth_bytes_per_s


def test_a_wrong_key_is_reported():
    with pytest.raises(InputError, match="decode"):
        reported("gpus = 4")
    with pytest.raises(InputError, match="batching policy named 'nothing'"):
        build(reported('batching = "nothing"'))
    with pytest.raises(InputError, match="central"):
        simulate.run(reported('router = "central"'))


LINK = 'link = "node"'
SPACE = "[search.space]\ndisaggregate = [false, true]\ntp = [2, 4]\n"


def test_a_decode_table_wins_over_the_first_value_of_disaggregate():
    """Axes give first values to what a scenario leaves unset; its decode table sets ``disaggregate``."""
    both = config.loads(TEXT % LINK + SPACE)
    assert build(both)[0].deployment.parallel.tp == 2
    assert len(simulate.run(both)[0].summary.hardware.replica_busy_share) == 3, "two that prefill, one that decodes"
    assert explain(build(both)[0]).sides is not None
    of_variant = (
        TEXT.replace("decode =", "# ") % LINK + SPACE + '[[variants]]\nname = "two"\ndeployment.decode.tp = 4\n'
    )
    assert build(config.loads(of_variant + '[[variants]]\nname = "one"\n'))[0].deployment.decode.parallel.tp == 4
    alone = config.loads(TEXT.replace("decode =", "# ") % LINK + SPACE)
    assert alone.deployment.disaggregate is False
    given = config.loads(TEXT % LINK + SPACE, overrides=["deployment.disaggregate=false"])
    assert build(given)[0].deployment.decode is None


def test_an_axis_of_some_alternatives_leaves_the_others_their_default():
    own = "[[search.any_of]]\ntp = 2\ndisaggregate = true\n[[search.any_of]]\ntp = [4]\n"
    loaded = config.loads(TEXT.replace("decode =", "# ") % LINK + own).deployment
    assert (loaded.disaggregate, loaded.tp) == (None, 2), "tp is an axis of both alternatives"
