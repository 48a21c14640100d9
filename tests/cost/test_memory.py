"""What fits: the planners' numbers against Vidur's and vLLM's, and errors that say what to do."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise import catalog
from lengthwise.cost import largest_model_len, plan_memory
from lengthwise.cost.memory import group_layers, shard_of
from lengthwise.schema.deployment import EngineLimits, KvGroups, Parallelism
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.specs import GIB

LIMITS = EngineLimits()
A100 = catalog.gpu("A100-80GB")
LLAMA_7B, LLAMA_70B = catalog.model("llama-2-7b"), catalog.model("llama-2-70b")


@pytest.mark.parametrize(
    ("model", "tp", "pp", "max_tokens", "blocks"),
    [
        (LLAMA_7B, 1, 1, 4096, 7424),
        (LLAMA_70B, 2, 1, 4096, 3328),
        (LLAMA_70B, 4, 1, 4096, 32768),
        (LLAMA_70B, 2, 2, 4096, 32768),
        (LLAMA_7B, 1, 1, 2048, 7552),
    ],
)
def test_vidur_planner_gives_the_recorded_blocks(model, tp, pp, max_tokens, blocks):
    plan = plan_memory(model, A100, Parallelism(tp, pp), LIMITS, max_tokens, planner="vidur")
    assert plan.num_blocks == blocks
    assert plan.planner == "vidur"


def test_blocks_of_vllm_on_a_4090_are_met_within_one_percent():
    # vLLM 0.19, Llama-3.1-8B, 25,250,627,584 bytes, utilisation 0.9: 2,588 blocks of 16 (LLMServingSim, MIT).
    gpu = replace(catalog.gpu("RTX-4090"), memory_bytes=25_250_627_584)
    plan = plan_memory(catalog.model("llama-3.1-8b"), gpu, Parallelism(), LIMITS, 4096)
    assert plan.num_blocks == pytest.approx(2588, rel=0.01)


def test_weights_and_activations_of_vllm_on_an_80_gib_gpu():
    # github.com/vllm-project/vllm/pull/10511: weights 14.96 GiB (7.48 with tp 2), activations 1.26 GiB.
    limits = replace(LIMITS, max_num_batched_tokens=8192)
    one = plan_memory(catalog.model("llama-3-8b"), A100, Parallelism(), limits, 8192)
    two = plan_memory(catalog.model("llama-3-8b"), A100, Parallelism(2), limits, 8192)
    assert one.weight_bytes / GIB == pytest.approx(14.96, abs=0.02)
    assert two.weight_bytes / GIB == pytest.approx(7.48, abs=0.02)
    assert one.activation_bytes / GIB == pytest.approx(1.26, rel=0.08)


@pytest.mark.parametrize("name", sorted(catalog.models()))
def test_one_gpu_holds_all_weights(name):
    model = catalog.model(name)
    used_bytes = shard_of(model, Parallelism(), LIMITS).stage_weight_bytes()
    assert used_bytes.sum() == pytest.approx(catalog.weight_bytes(model), rel=1e-3)


@given(name=st.sampled_from(sorted(catalog.models())), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 3]))
def test_shards_hold_at_least_the_model_between_them(name, tp, pp):
    model = catalog.model(name)
    if model.attention.heads % tp:
        return
    used_bytes = tp * shard_of(model, Parallelism(tp, pp), LIMITS).stage_weight_bytes().sum()
    assert used_bytes >= 0.999 * catalog.weight_bytes(model)


def test_kv_heads_are_replicated_beyond_their_number():
    llama = catalog.model("llama-3.1-8b")  # 8 KV heads
    per_block = [plan_memory(llama, A100, Parallelism(tp), LIMITS, 4096).kv_bytes_per_block for tp in (1, 4, 8, 16)]
    assert per_block[0] / per_block[1] == 4
    assert per_block[1] / per_block[2] == 2
    assert per_block[2] == per_block[3]


def test_plan_adds_up_and_blocks_fill_what_is_left():
    plan = plan_memory(LLAMA_70B, A100, Parallelism(4), LIMITS, 4096)
    used_bytes = plan.weight_bytes + plan.activation_bytes + (plan.num_blocks + 1) * plan.kv_bytes_per_block
    assert 0 <= plan.available_bytes - used_bytes < plan.kv_bytes_per_block
    assert plan.swap_s_per_block == pytest.approx(plan.kv_bytes_per_block / 25e9)


def test_vllm_reserves_a_null_block_and_vidur_none():
    tight = replace(LIMITS, max_model_len=None)
    longest = largest_model_len(LLAMA_70B, catalog.gpu("H100"), Parallelism(2), tight)
    plan = plan_memory(LLAMA_70B, catalog.gpu("H100"), Parallelism(2), tight, longest)
    left = plan.available_bytes - plan.weight_bytes - plan.activation_bytes
    assert plan.num_blocks == int(left / plan.kv_bytes_per_block) - 1
    with_vidur = plan_memory(LLAMA_7B, A100, Parallelism(), LIMITS, 4096, planner="vidur")
    assert with_vidur.num_blocks % (4096 // 16) == 0


def test_states_of_linear_attention_leave_less_for_the_cache_of_the_other_layers():
    model, gpu = catalog.model("qwen3-next-80b-a3b"), catalog.gpu("H200")
    few, many = (plan_memory(model, gpu, Parallelism(2), replace(LIMITS, max_num_seqs=seqs), 4096) for seqs in (1, 256))
    # 12 of 48 layers cache keys and values of one of two heads, 256 wide, in 16 bits.
    assert many.kv_bytes_per_block == pytest.approx(16 * 12 * 2 * 256 * 2)
    more = many.activation_bytes - few.activation_bytes
    logits = 255 * 3 * 4 * model.vocab
    assert more == pytest.approx(logits + 255 * catalog.state_bytes_per_sequence(model) / 2)


def test_more_memory_or_utilisation_never_means_fewer_blocks():
    plans = [
        plan_memory(LLAMA_7B, A100, Parallelism(), replace(LIMITS, gpu_memory_utilization=u), 4096)
        for u in (0.5, 0.7, 0.9)
    ]
    assert plans[0].num_blocks < plans[1].num_blocks < plans[2].num_blocks


def test_override_is_taken_as_it_is():
    assert plan_memory(LLAMA_7B, A100, Parallelism(), LIMITS, 4096, "vidur", 1500).num_blocks == 1500
    with pytest.raises(InputError, match="num_blocks must be at least 1"):
        plan_memory(LLAMA_7B, A100, Parallelism(), LIMITS, 4096, num_blocks=0)


@pytest.mark.parametrize("planner", ["lengthwise", "vidur"])
def test_the_error_of_too_large_a_model_gives_the_shortfall_and_a_tp_that_fits(planner):
    with pytest.raises(DoesNotFitError, match=r"GiB too little\. The smallest tp that fits is 2\."):
        plan_memory(LLAMA_70B, A100, Parallelism(), LIMITS, 4096, planner)


def test_the_named_tp_does_fit_and_the_one_before_does_not():
    model, gpu = catalog.model("deepseek-v3"), catalog.gpu("H200")
    with pytest.raises(DoesNotFitError, match="The smallest tp that fits is 8"):
        plan_memory(model, gpu, Parallelism(4), LIMITS, 4096)
    assert plan_memory(model, gpu, Parallelism(8), LIMITS, 4096).num_blocks > 0


def test_hopeless_and_too_long_cases_suggest_other_remedies():
    gpu = catalog.gpu("L4")
    with pytest.raises(DoesNotFitError, match="more pipeline stages"):
        plan_memory(catalog.model("llama-3.1-405b"), gpu, Parallelism(), LIMITS, 4096)
    long = catalog.model("phi-3.5-mini")
    assert long.attention.heads == 32
    with pytest.raises(DoesNotFitError, match="GiB too little"):
        plan_memory(long, gpu, Parallelism(), LIMITS, 131072)


def test_largest_model_len_is_the_models_own_or_what_the_cache_holds():
    gpu, model = catalog.gpu("RTX-4090"), catalog.model("llama-3.1-8b")
    longest = largest_model_len(model, gpu, Parallelism(), LIMITS)
    assert longest < model.max_model_len
    plan_memory(model, gpu, Parallelism(), LIMITS, longest)
    with pytest.raises(DoesNotFitError):
        plan_memory(model, gpu, Parallelism(), LIMITS, longest + LIMITS.block_size)
    assert largest_model_len(LLAMA_70B, A100, Parallelism(4), LIMITS) == 4096
    assert largest_model_len(LLAMA_70B, A100, Parallelism(2), LIMITS, "vidur") == 4096
    assert largest_model_len(LLAMA_7B, A100, Parallelism(), LIMITS, num_blocks=10) == 160
    with pytest.raises(DoesNotFitError):
        largest_model_len(LLAMA_70B, A100, Parallelism(), LIMITS, "vidur")


def test_degree_must_divide_heads_and_planner_must_exist():
    with pytest.raises(InputError, match=r"tp must divide the 64 attention heads.*Use one of 1, 2, 4, 8, 16"):
        plan_memory(LLAMA_70B, A100, Parallelism(3), LIMITS, 4096)
    with pytest.raises(UnknownNameError, match="no memory planner named 'vidor'"):
        plan_memory(LLAMA_70B, A100, Parallelism(2), LIMITS, 4096, "vidor")


@pytest.mark.parametrize(
    ("layers", "groups"),
    [
        ((10, 20, 0), (10, 1, 2, 0)),  # the example in vLLM's kv_cache_utils.py
        ((13, 12, 0), (13, 1, 1, 0)),  # gpt-oss-20b with a draft layer: the larger size, below 1.5 times the smaller
        ((10, 52, 0), (10, 1, 6, 0)),  # gemma-3-27b: five sixths of a group are filled
        ((5, 7, 6), (7, 1, 1, 1)),
        ((0, 32, 0), (32, 0, 1, 0)),
    ],
)
def test_layers_form_groups_as_in_vllm(layers, groups):
    assert group_layers(*layers) == groups


def planned(name, tp=1, **limits):
    limits = EngineLimits(max_num_batched_tokens=8192, **limits)
    return plan_memory(catalog.model(name), catalog.gpu("H200"), Parallelism(tp), limits, 1000, hybrid=True)


def test_a_block_has_the_layers_of_one_group():
    kv = planned("gemma-3-27b")
    assert kv.groups == KvGroups(16, 1, 6, 1024, in_flight_tokens=8192)
    assert kv.kv_bytes_per_block == pytest.approx(10 * 16 * 2 * 16 * 128 * 2)
    assert planned("llama-4-scout", 8).groups == KvGroups(16, 1, 3, 8192, chunked=True, in_flight_tokens=8192)
    assert planned("llama-3.1-8b").groups is None


@pytest.mark.parametrize(("tp", "block_size"), [(1, 544), (2, 544), (4, 272)])
def test_a_block_is_no_smaller_than_a_state(tp, block_size):
    """vLLM's _align_hybrid_block_size: multiples of 16 tokens. Each of four GPUs has a copy of one of two KV heads."""
    kv = planned("qwen3-next-80b-a3b", tp, weight_dtype="fp8")
    assert kv.groups.states == 3
    assert kv.block_size == block_size
    state = catalog.state_bytes_per_sequence(catalog.model("qwen3-next-80b-a3b")) / 36 / tp
    assert kv.kv_bytes_per_block / 12 >= state


def test_windows_multiply_the_tokens_that_fit():
    def tokens(hybrid):
        limits = EngineLimits(max_num_batched_tokens=8192)
        return largest_model_len(
            catalog.model("gemma-3-27b"), catalog.gpu("H100"), Parallelism(1), limits, hybrid=hybrid
        )

    assert tokens(hybrid=True) == 131_072 > 3 * tokens(hybrid=False)


def test_given_blocks_must_hold_the_longest_request():
    limits = EngineLimits(max_num_batched_tokens=8192, max_model_len=1000)
    with pytest.raises(
        InputError, match=r"one request, which are 447 in the groups .* it has 100\. Give more num_blocks"
    ):
        largest_model_len(
            catalog.model("gemma-3-27b"), catalog.gpu("H100"), Parallelism(1), limits, num_blocks=100, hybrid=True
        )
