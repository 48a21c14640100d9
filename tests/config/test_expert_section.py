"""``dp``, ``ep`` and their companions in ``[deployment]``: from a file to a deployment, and what explains them."""

import pytest

from lengthwise import config
from lengthwise.cli import main
from lengthwise.report.json_file import deployment_facts
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.usecases.explain import explain
from lengthwise.usecases.variants import build

TEXT = """
[workload]
preset = "chat-1m"
request_rate = 2.0
num_requests = 40
[deployment]
model = "{model}"
gpu = "H200"
weight_dtype = "fp8"
{keys}
[engine]
max_model_len = 4096
[run]
model_draws = 0
"""


def loaded(keys, model="qwen3-235b-a22b"):
    return config.loads(TEXT.format(model=model, keys=keys))


def test_a_file_divides_experts_among_the_ranks_of_a_replica():
    found = loaded("data_parallel_size = 4\ntp = 2\nep = 8\nredundant_experts = 16\nreplicas = 2")
    assert found.deployment.gpus == 16
    (made,) = build(found)
    parallel = made.deployment.parallel
    assert (parallel.dp, parallel.tp, parallel.ep, parallel.redundant_experts) == (4, 2, 8, 16)
    assert (made.deployment.gpus, parallel.gpus_per_replica, parallel.gpus_per_expert) == (16, 8, 1)
    described = deployment_facts(made.deployment)
    assert (described["dp"], described["ep"], described["gpus"]) == (4, 8, 16)
    assert config.loads(found.to_toml()).deployment == found.deployment


def test_an_override_reaches_the_keys_and_a_model_without_experts_refuses_them(tmp_path, capsys):
    path = tmp_path / "dense.toml"
    path.write_text(TEXT.format(model="llama-3.1-8b", keys=""))
    assert main(["explain", str(path), "--set", "deployment.dp=2"]) == 2
    assert "set replicas = 2" in capsys.readouterr().err
    assert main(["explain", str(path), "--set", "deployment.all2all_backend=pplx"]) == 2
    assert "'deepep_low_latency'" in capsys.readouterr().err


def test_each_side_has_ranks_of_its_own():
    keys = 'tp = 4\ndp = 2\nep = 8\nredundant_experts = 16\nall2all_backend = "deepep_high_throughput"\n'
    wide = 'decode = { tp = 1, dp = 16, redundant_experts = 32, all2all_backend = "deepep_low_latency" }'
    shapes = {
        wide: Parallelism(1, dp=16, ep=16, redundant_experts=32, all2all_backend="deepep_low_latency"),
        "disaggregate = true": Parallelism(
            4, dp=2, ep=8, redundant_experts=16, all2all_backend="deepep_high_throughput"
        ),
        "decode = { tp = 2, dp = 1 }": Parallelism(2, ep=2, redundant_experts=16),
        "decode = { dp = 2, ep = 1 }": Parallelism(4, dp=2),
    }
    for decode, expected in shapes.items():
        (variant,) = build(loaded(keys + decode))
        assert variant.deployment.decode.parallel == expected
        assert variant.deployment.gpus == 8 + expected.gpus
        assert deployment_facts(variant.deployment)["decode"]["dp"] == expected.dp
    alone = build(loaded("tp = 8\ndecode = { tp = 1, dp = 16, ep = 16 }"))[0].deployment
    assert (alone.parallel.dp, alone.decode.parallel.ep) == (1, 16)


def test_ranks_with_a_wrong_decode_side_are_refused():
    (equal,) = build(loaded("dp = 2\nep = 2\ntp = 4\ndisaggregate = false\ndecode = { tp = 8 }"))
    assert (equal.deployment.parallel.dp, equal.deployment.decode) == (2, None)
    with pytest.raises(InputError, match="one of 1, 2, 4"):
        build(loaded("tp = 4\nep = 3"))


def test_a_decode_side_divides_experts_as_the_prefill_side_as_far_as_its_gpus_allow():
    keys = "tp = 8\nep = 8\nredundant_experts = 16\ndecode = { tp = %d }"
    for tp, experts in ((8, (8, 16)), (4, (4, 16)), (16, (16, 16))):
        decode = build(loaded(keys % tp))[0].deployment.decode.parallel
        assert (decode.tp, decode.ep, decode.redundant_experts) == (tp, *experts)
    small = "tp = 2\nep = 2\nredundant_experts = 0\ndecode = { tp = 1 }"
    assert build(loaded(small, "qwen3-30b-a3b"))[0].deployment.decode.parallel.redundant_experts is None
    with pytest.raises(InputError, match="redundant_experts together must be a multiple of ep, 12") as caught:
        build(loaded(keys % 12, "minimax-m2"))
    assert any("deployment.decode" in note for note in caught.value.__notes__)


def test_explain_shows_the_split_and_counts_the_tokens_of_all_ranks(tmp_path, capsys):
    (ranks,), (one,) = (build(loaded(keys)) for keys in ("dp = 8\nep = 8", "tp = 8"))
    found, alone = explain(ranks), explain(one)
    assert found.steps[0].tokens == 8 * alone.steps[0].tokens
    assert {"all-gather", "reduce-scatter"} <= {operator.name for operator in found.steps[0].operators}
    path = tmp_path / "ranks.toml"
    path.write_text(TEXT.format(model="qwen3-235b-a22b", keys="dp = 8\nep = 8\nredundant_experts = 0"))
    assert main(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "dp 8, ep 8 (EPLB, 0 redundant experts), allgather_reducescatter" in shown
    assert "each of 8 data-parallel ranks" in shown
