"""``[deployment.decode]``: from a file to two sides, and who refuses them."""

from __future__ import annotations

import re

import pytest

from lengthwise import backend, config
from lengthwise.cli.explain import show
from lengthwise.cost.model_error import comparable_deployments, perturbed_deployments
from lengthwise.report.json_file import deployment_facts
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
    host = build(reported('link = "host", kv_transfer = "2ms", link_sharing = "none"'))[0].deployment
    kv_bytes = 2 * 32 * 8 * 128 * 2  # keys and values, layers, KV heads, dimensions, bytes
    assert node.decode.kv_transfer.bytes_per_token == kv_bytes, "one GPU sends what two receive"
    assert node.decode.kv_transfer.bytes_per_s == node.node.link_for(3).bandwidth_bytes_per_s
    assert host.decode.kv_transfer.bytes_per_token == kv_bytes * 1.5
    assert host.decode.kv_transfer.fixed_s == 0.002
    assert host.decode.kv_transfer.sharing == "none"
    assert node.decode.kv_transfer.sharing == "fcfs"


@pytest.mark.parametrize(
    ("model", "pp", "layers"), [("llama-3.1-8b", 1, 32), ("llama-3.1-8b", 2, 16), ("qwen3.5-397b-a17b", 1, 15)]
)
def test_a_transfer_layer_by_layer_has_the_layers_that_a_gpu_caches(model, pp, layers):
    sides = [f"deployment.model={model}", f"deployment.pp={pp}", "deployment.replicas=1"]
    sides += ["deployment.decode.tp=8", "deployment.weight_dtype=fp8", *(["deployment.tp=8"] if pp == 1 else [])]
    (one,) = build(config.loads(TEXT % "layerwise = true", overrides=sides))
    transfer = one.deployment.decode.kv_transfer
    assert transfer.layers == layers


def test_conditional_disaggregation_from_a_file(capsys):
    text = 'link_sharing = "fair", max_local_prefill_length = 512, max_prefill_queue_size = 8, '
    text += 'switch_gb_per_s = 1.0, kv_transfer_timeout = "2s", kv_load_failure_policy = "recompute", layerwise = true'
    one = build(reported(text))[0]
    side = one.deployment.decode
    assert (side.kv_transfer.sharing, side.max_local_prefill_length, side.max_prefill_queue_size) == ("fair", 512, 8)
    shown = deployment_facts(one.deployment)["decode"]
    assert (shown["link_sharing"], shown["max_local_prefill_length"], shown["max_prefill_queue_size"]) == (
        "fair",
        512,
        8,
    )
    assert shown["transfer_layers"] == one.deployment.model.layers
    token_bytes = 2 * 32 * 8 * 128 * 2  # keys and values of 32 layers with 8 heads of 128 dimensions in 16 bits
    assert side.kv_transfer.token_s / shown["links_at_once"] == pytest.approx(token_bytes / 1e9)
    show(one, explain(one))
    text = " ".join(capsys.readouterr().out.split())
    sharing = "links shared, and a switch as fast as 0.00225 of them;"
    link, transfer = side.kv_transfer, re.search(rf"KV transfer (\S+) (us|ms|s) for a mean prompt, {sharing}", text)
    last = re.search(r"the step that completes a prompt to (\S+) (us|ms|s) or more after its end;", text)
    all_s, last_s = (float(one[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[one[2]] for one in (transfer, last))
    assert last_s == pytest.approx(link.fixed_s + (all_s - link.fixed_s) / link.layers, rel=0.01)
    assert "a request is recomputed that waits 2.00 s for it" in text
    assert "prompts of up to 512 tokens, and any while 8 or more wait on the prefill side" in text
    for bad in ("max_local_prefill_length = -1", "max_prefill_queue_size = 0", 'link_sharing = "some"'):
        with pytest.raises(InputError, match=bad.split()[0]):
            reported(bad)


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


def test_a_transfer_without_a_link_names_the_network_that_is_missing(tmp_path):
    lonely = tmp_path / "lonely.toml"
    lonely.write_text(
        '[lonely]\ngpus = 4\nlink = "nvlink4-nvswitch"\nlink_group = 4\nfallback_link = "pcie5"\nsource = "x"\n'
    )
    message = r'node lonely must give network;.* KV transfers .* need it\. Give .*, such as network = "infiniband-ndr"'
    with pytest.raises(InputError, match=message):
        build(reported(f'node = "{lonely}"'))


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


UNLIKE = 'gpu = "H200", router = "least_outstanding"'


def test_sides_have_gpus_links_and_prices_of_their_own():
    """Two H100 prefill and two H200 decode: other step times, memory and price, and the network between them."""
    one, same = build(reported(UNLIKE))[0].deployment, build(reported())[0].deployment
    prefill, decode = one.sides
    assert (prefill.gpu.name, decode.gpu.name) == ("H100", "H200")
    assert one.hardware == "2 x H100 + 2 x H200"
    assert (decode.node.name, prefill.node.name) == ("hgx-h200", "dgx-h100")
    assert prefill.price_per_hour_usd + decode.price_per_hour_usd == pytest.approx(one.price_per_hour_usd)
    assert decode.price_per_hour_usd == pytest.approx(2 * decode.gpu.price_per_hour_usd)
    assert one.cost.layer_s.tolist() == same.cost.layer_s.tolist()
    alone = {"deployment": {"gpu": "H200", "tp": 2, "disaggregate": False}, "engine": {"max_num_seqs": 64}}
    h200 = build(reported().updated(alone))[0].deployment
    assert decode.cost.decode_s.tolist() == h200.cost.decode_s.tolist()
    assert decode.kv.num_blocks == h200.kv.num_blocks > same.decode.kv.num_blocks
    assert one.decode.kv_transfer.bytes_per_s == decode.node.network.bandwidth_bytes_per_s, "no node has both"
    assert build(reported('gpu = "H100"'))[0].deployment.decode.kv_transfer == same.decode.kv_transfer


def test_the_end_with_the_slower_link_sets_the_time_of_a_transfer():
    """A replica of one GPU sends all at its link's speed, eight receivers an eighth each at theirs."""
    kv_bytes = 2 * 32 * 8 * 128 * 2
    for tp, moved in ((8, kv_bytes), (1, kv_bytes), (2, kv_bytes / 2)):
        text = 'gpu = "L40S", node = "pcie4-8", kv_transfer = "1ms"'
        one = build(config.loads(TEXT.replace("tp = 2,", f"tp = {tp},") % text))[0].deployment
        prefill, decode = one.sides
        fast, slow = (side.node.network.bandwidth_bytes_per_s for side in (prefill, decode))
        assert 2 * slow < fast < 8 * slow
        expected = {8: kv_bytes / fast, 1: kv_bytes / slow, 2: kv_bytes / 2 / slow}[tp]
        assert one.decode.kv_transfer.token_s == pytest.approx(expected)
        assert one.decode.kv_transfer.bytes_per_token == moved
        latency_s = max(prefill.node.network.latency_s, decode.node.network.latency_s)
        assert one.decode.kv_transfer.fixed_s == pytest.approx(0.001 + latency_s)


def test_sides_that_cannot_be_built_name_the_decode_side():
    with pytest.raises(InputError, match="no GPU named 'H300'") as raised:
        build(reported('gpu = "H300"'))
    assert "of deployment.decode" in "".join(raised.value.__notes__)
    with pytest.raises(InputError, match=r"cost.*must be one of roofline"):
        reported('cost = "guess"')
    text = TEXT.replace("llama-3.1-8b", "llama-3.1-70b").replace("replicas = 2\n", "tp = 4\n")
    with pytest.raises(InputError, match=r"does not fit L40S .* The smallest tp that fits is 4") as raised:
        build(config.loads(text % 'gpu = "L40S"'))
    assert "of deployment.decode" in "".join(raised.value.__notes__)


def test_a_run_on_unlike_gpus_reports_both(capsys):
    outcome = simulate.run(reported(UNLIKE))[0]
    assert outcome.summary.counts.finished == 40
    properties = deployment_facts(outcome.variant.deployment)
    assert (properties["gpu"], properties["decode"]["gpu"], properties["gpus"]) == ("H100", "H200", 4)
    assert "roofline of llama-3.1-8b on H200" in properties["decode"]["cost_source"]
    assert 0 < outcome.summary.hardware.mfu.value < 1
    assert outcome.summary.hardware.power_w.value <= 2 * 700 + 2 * 700
    variant = build(reported(UNLIKE))[0]
    show(variant, explain(variant))
    text = capsys.readouterr().out
    assert "2 x H100 + 2 x H200 (dgx-h100, hgx-h200)" in text
    assert "tp 1, pp 1, replicas 2, on 2 x H100" in text
    assert "tp 2, pp 1, replicas 1, on 2 x H200" in text


def test_errors_of_the_cost_model_are_those_of_each_gpu():
    """Sides with one GPU share them; a side with another GPU has those of deployments on that GPU."""
    unlike, alike = build(reported(UNLIKE))[0].deployment, build(reported())[0].deployment

    def factors(deployment, side):
        made = comparable_deployments(deployment, 4)[1:]
        before = deployment.sides[side].cost.layer_s[1:]
        return [float((one.sides[side].cost.layer_s[1:] / before).mean()) for one in made]

    assert factors(alike, 0) == pytest.approx(factors(alike, 1))
    assert factors(unlike, 0) == pytest.approx(factors(alike, 0))
    assert factors(unlike, 1) == pytest.approx(factors(unlike.decoding(), 0))
    assert factors(unlike, 1) != pytest.approx(factors(unlike, 0))
    made = perturbed_deployments(unlike, 4)
    ratios = [[one.sides[at].cost.layer_s[5] / unlike.sides[at].cost.layer_s[5] for one in made] for at in (0, 1)]
    assert ratios[0] != pytest.approx(ratios[1])


def test_experts_are_divided_on_each_side():
    text = TEXT.replace("llama-3.1-8b", "gpt-oss-20b").replace("replicas = 2\n", "tp = 2\nep = 2\n")
    for given, ep in (("replicas = 1", 2), ("ep = 1", 1)):
        variant = build(config.loads(text % given))[0]
        assert [side.parallel.ep for side in variant.deployment.sides] == [2, ep]
    with pytest.raises(InputError, match="ep"):
        build(config.loads(text % "ep = 3"))


OWN_GPU = """
[Mine]
peak_flops = { bf16 = 500e12 }
memory_bytes = 80_000_000_000
bandwidth_bytes_per_s = 3e12
tdp_w = 300
idle_w = 20
price_per_hour_usd = 1.0
price_source = "ours"
source = "a data sheet"
usual_nodes = ["dgx-h100"]
"""


def test_files_of_the_decode_side_are_files_of_the_scenario(tmp_path):
    own = tmp_path / "gpu.toml"
    own.write_text(OWN_GPU)
    path = tmp_path / "one.toml"
    path.write_text(TEXT % 'gpu = "gpu.toml"')
    loaded = config.load(path)
    assert own in loaded.files
    assert loaded.with_absolute_paths().deployment.decode.gpu == str(own)
    assert build(loaded)[0].deployment.decode.gpu.name == "Mine"
