from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from lengthwise import EngineLimits, Scheduler, catalog, deploy
from lengthwise.backend import sglang_launch, sglang_split_launches, trtllm_launch, vllm_launch
from lengthwise.backend.trtllm import trtllm_options
from lengthwise.policy import known, named, rank, scheduler
from lengthwise.schema.deployment import KVOffloading, KVStorage, SglangSettings
from lengthwise.schema.errors import InputError, UnknownNameError


def deployment(**options):
    options.setdefault("limits", EngineLimits(max_model_len=4096))
    return deploy("llama-3.1-8b", "H100", **options)


def value(launch, flag):
    """The word after a flag; True for a flag that stands alone, None where it is absent."""
    words = launch.command
    if flag not in words:
        return None
    after = words[words.index(flag) + 1 :][:1]
    return after[0] if after and not after[0].startswith("--") else True


@pytest.mark.parametrize(
    ("model", "loaded"),
    [
        ("llama-2-70b", "meta-llama/Llama-2-70b-chat-hf"),
        ("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.1"),
        ("gemma-2-9b", "google/gemma-2-9b-it"),
        ("qwen3-8b", "Qwen/Qwen3-8B"),  # follows instructions without saying so
        ("opt-13b", "facebook/opt-13b"),  # there is no other
    ],
)
def test_of_checkpoints_of_the_same_shapes_one_that_can_chat_is_loaded(model, loaded):
    """A base model has no chat template: its engine refuses /v1/chat/completions."""
    launch = vllm_launch(deploy(model, "H100", tp=2))
    assert launch.command[2] == loaded
    siblings = [one for one in catalog.model(model).metadata.aliases if one.count("/") == 1 and one != loaded]
    assert all(any(one in note for note in launch.notes) for one in siblings)


@pytest.mark.parametrize(("scheduler", "flag"), [("vllm_v1", "0"), ("isrtf", "0"), ("vllm_v0", "0.01")])
def test_a_watermark_that_is_not_given_is_that_of_the_engine(scheduler, flag):
    assert value(vllm_launch(deployment(scheduler=scheduler)), "--watermark") == flag


def test_a_quantised_checkpoint_is_loaded_under_the_name_that_was_given():
    launch = vllm_launch(deploy("someone/Llama-3.1-8B-Instruct-FP8", "H100"))
    assert launch.command[2] == "someone/Llama-3.1-8B-Instruct-FP8"
    assert value(launch, "--quantization") is None
    assert not vllm_launch(deploy("llama-3.1-8b-fp8", "H100")).command[2].startswith("meta-llama")


def message(launch, *words):
    return [note for note in launch.notes if all(word in note for word in words)]


def test_the_knobs_arrive_under_vllms_names():
    limits = EngineLimits(
        max_num_seqs=64,
        max_num_batched_tokens=1024,
        block_size=32,
        gpu_memory_utilization=0.85,
        max_model_len=4096,
        watermark=0.02,
    )
    launch = vllm_launch(deployment(tp=2, pp=2, limits=limits), port=8123)
    assert launch.command[:3] == ("vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct")
    expected = {
        "--served-model-name": "llama-3.1-8b",
        "--port": "8123",
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "2",
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "1024",
        "--block-size": "32",
        "--gpu-memory-utilization": "0.85",
        "--watermark": "0.02",
        "--scheduling-policy": "fcfs",
        "--no-enable-prefix-caching": True,
        "--no-enable-chunked-prefill": None,
        "--num-gpu-blocks-override": None,
        "--quantization": None,
        "--nnodes": None,
    }
    assert {flag: value(launch, flag) for flag in expected} == expected


def test_the_knobs_arrive_under_sglangs_names():
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=1000, block_size=32, max_model_len=4096)
    d = deployment(tp=2, limits=limits)
    launch = sglang_launch(d)
    assert launch.command[:3] == ("python3", "-m", "sglang.launch_server")
    share = (d.kv.weight_bytes + d.kv.num_blocks * d.kv.kv_bytes_per_block) / d.gpu.memory_bytes
    expected = {
        "--model-path": "meta-llama/Llama-3.1-8B-Instruct",
        "--tp-size": "2",
        "--context-length": "4096",
        "--max-running-requests": "64",
        "--chunked-prefill-size": "992",  # whole pages
        "--enable-mixed-chunk": True,
        "--page-size": "32",
        "--mem-fraction-static": f"{share:.3f}",
        "--disable-radix-cache": True,
    }
    assert {flag: value(launch, flag) for flag in expected} == expected
    assert share < limits.gpu_memory_utilization


@pytest.mark.parametrize(
    ("policy", "flag", "note"),
    [("slru", "slru", ""), ("fifo", None, "evicted by fifo"), ("priority", "priority", "smallest `priority`")],
)
def test_sglang_gets_the_radix_cache_that_was_simulated(policy, flag, note):
    limits = EngineLimits(enable_prefix_caching=True, prefix_cache="sglang", radix_eviction_policy=policy)
    launch = sglang_launch(deployment(limits=limits))
    assert value(launch, "--disable-radix-cache") is None
    assert value(launch, "--radix-eviction-policy") == flag
    assert message(launch, note)


@pytest.mark.parametrize("overlap", [False, True])
def test_sglang_notes_where_the_simulation_lacked_its_overlap_of_steps(overlap):
    by_its_rules = Scheduler(sglang=SglangSettings(), async_scheduling=overlap)
    launch = sglang_launch(deployment(scheduler=by_its_rules))
    assert any("one after the other" in note for note in launch.notes) != overlap
    assert value(launch, "--disable-overlap-schedule") is None  # The server overlaps steps by default.


def test_sglang_gets_the_order_of_the_queue_that_was_simulated():
    assert value(sglang_launch(deployment()), "--schedule-policy") == "fcfs"
    by_limit = Scheduler("queue_order", sglang=SglangSettings(schedule_policy="lof"))
    assert value(sglang_launch(deployment(scheduler=by_limit)), "--schedule-policy") == "lof"


def test_asynchronous_scheduling_is_vllms_default_and_noted_where_it_was_not_simulated():
    launch = vllm_launch(deployment(scheduler=Scheduler(memory="paged_by_chunk", async_scheduling=True)))
    assert value(launch, "--async-scheduling") is True
    assert not any("--async-scheduling" in note for note in launch.notes)
    launch = vllm_launch(deployment())
    assert value(launch, "--async-scheduling") is None
    assert any("--async-scheduling" in note for note in launch.notes)


def test_the_cap_of_long_prompts_is_vllms_alone():
    d = deployment(scheduler=Scheduler(memory="paged_by_chunk", long_prefill_token_threshold=512))
    assert value(vllm_launch(d), "--long-prefill-token-threshold") == "512"
    assert value(vllm_launch(deployment()), "--long-prefill-token-threshold") is None
    for launch in (sglang_launch(d), trtllm_launch(d)):
        assert any("at most 512 tokens of one prompt" in note for note in launch.notes)
    assert not any("tokens of one prompt" in note for note in vllm_launch(d).notes)


def test_the_prefix_cache_is_on_where_it_was_simulated():
    d = deployment(limits=EngineLimits(max_model_len=4096, enable_prefix_caching=True))
    assert value(vllm_launch(d), "--enable-prefix-caching") is True
    assert value(vllm_launch(d), "--no-enable-prefix-caching") is None
    assert value(sglang_launch(d), "--disable-radix-cache") is None


def test_the_cpu_memory_behind_the_cache_arrives_in_gib():
    offloading = KVOffloading(64.0, load="if_faster")
    launch = vllm_launch(deployment(limits=EngineLimits(enable_prefix_caching=True, kv_offloading=offloading)))
    assert float(value(launch, "--kv-offloading-size")) == pytest.approx(64e9 / 2**30, rel=1e-5)
    assert message(launch, "vLLM loads all that CPU memory has")
    for size_gb in (64.0, 0.0):
        limits = EngineLimits(enable_prefix_caching=True, kv_offloading=KVOffloading(size_gb))
        notes = sglang_launch(deployment(limits=limits)).notes
        assert any("CPU memory behind the prefix cache" in note for note in notes) == (size_gb > 0)
    assert value(launch, "--kv-transfer-config") is None
    assert value(vllm_launch(deployment()), "--kv-offloading-size") is None


@pytest.mark.parametrize("storage", [None, KVStorage()])
def test_blocks_of_outputs_are_stored_where_the_simulation_stored_them(storage):
    offloading = KVOffloading(64.0, outputs=True, storage=storage)
    launch = vllm_launch(deployment(limits=EngineLimits(enable_prefix_caching=True, kv_offloading=offloading)))
    extra = json.loads(value(launch, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra["offload_prompt_only"] is False
    assert ("secondary_tiers" in extra) == (storage is not None)
    assert message(launch, "vLLM stores the blocks of an output as they fill")


def test_storage_is_the_file_system_tier_of_vllm():
    storage = KVStorage(2000.0, shared=True)
    limits = EngineLimits(enable_prefix_caching=True, kv_offloading=KVOffloading(64.0, storage=storage))
    launch = vllm_launch(deployment(limits=limits))
    extra = json.loads(value(launch, "--kv-transfer-config"))["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": "/mnt/kv-cache"}]
    assert float(value(launch, "--kv-offloading-size")) == pytest.approx(64e9 / 2**30, rel=1e-5)
    assert message(launch, "/mnt/kv-cache", "one file system on all replicas' machines")
    assert message(launch, "to stay within 2000 GB")


def test_each_replica_sees_its_own_gpus_of_its_node():
    d = deployment(tp=4, replicas=3)
    seen = [vllm_launch(d, replica=r).environment["CUDA_VISIBLE_DEVICES"] for r in range(3)]
    assert seen == ["0,1,2,3", "4,5,6,7", "0,1,2,3"]
    with pytest.raises(InputError, match=r"0\.\.2; it is 3"):
        vllm_launch(d, replica=3)


def test_unknown_devices_are_reported():
    with pytest.raises(UnknownNameError, match="no device named"):
        vllm_launch(deployment(), device="gpu")


@pytest.mark.parametrize(
    ("dtype", "vllm", "sglang"),
    [("fp8", "fp8_per_tensor", "fp8"), ("int8", "int8_per_channel_weight_only", None), ("int4", None, None)],
)
def test_quantized_weights_are_made_while_loading_or_requested(dtype, vllm, sglang):
    d = deployment(limits=EngineLimits(weight_dtype=dtype, max_model_len=4096))
    for launch, method in ((vllm_launch(d), vllm), (sglang_launch(d), sglang)):
        assert value(launch, "--quantization") == method
        assert ("$MODEL" in launch.command) == (method is None)
        assert message(launch, dtype, "simulated")
    given = vllm_launch(d, model="someone/a-quantised-one")
    assert given.command[2] == "someone/a-quantised-one"
    assert value(given, "--quantization") is None


def test_a_checkpoint_that_is_published_quantised_needs_no_flag():
    d = deploy("deepseek-v3", "H200", tp=8, pp=2, limits=EngineLimits(max_model_len=4096))
    assert d.model.dtype == "fp8"
    launch = vllm_launch(d)
    assert value(launch, "--quantization") is None
    assert launch.command[2] == "deepseek-ai/DeepSeek-V3"


def test_an_unpublished_model_leaves_a_placeholder():
    launch = vllm_launch(deploy("gpt3-39b", "H100", tp=2))
    assert launch.command[2] == "$MODEL"
    assert message(launch, "set MODEL")


@pytest.mark.parametrize(
    ("dtype", "vllm", "sglang"), [("fp8", "fp8", "fp8_e4m3"), ("int8", "int8_per_token_head", None)]
)
def test_the_cache_has_the_simulated_dtype_or_a_note(dtype, vllm, sglang):
    d = deployment(limits=EngineLimits(kv_dtype=dtype, max_model_len=4096))
    assert value(vllm_launch(d), "--kv-cache-dtype") == vllm
    assert value(sglang_launch(d), "--kv-cache-dtype") == sglang
    assert bool(message(sglang_launch(d), "no KV cache of int8")) == (sglang is None)


def test_a_given_number_of_blocks_is_handed_on_and_a_planned_one_is_not():
    planned, given = deployment(), deployment(num_blocks=1000)
    assert value(vllm_launch(planned), "--num-gpu-blocks-override") is None
    assert message(vllm_launch(planned), f"{planned.kv.num_blocks * 16:,} tokens", "planned")
    assert value(vllm_launch(given), "--num-gpu-blocks-override") == "1001"  # vLLM keeps one itself
    assert value(sglang_launch(given), "--max-total-tokens") == "16000"


@pytest.mark.parametrize("share", [0.05, 0.5, 0.7, 0.98, 1.0])
def test_a_cap_of_tokens_decides_and_not_the_fraction(share):
    """Engines take the smaller pool, and TensorRT-LLM's fraction is of what is free after activations."""
    planned = deployment(limits=EngineLimits(max_model_len=4096, gpu_memory_utilization=0.97))
    d = deployment(num_blocks=int(share * planned.kv.num_blocks) - 1)
    pool, free = d.kv.num_blocks * d.kv.kv_bytes_per_block, d.gpu.memory_bytes - d.kv.weight_bytes
    options = yaml.safe_load(trtllm_options(d))["kv_cache_config"]
    assert options["max_tokens"] == d.kv.num_blocks * 16
    fraction = options.get("free_gpu_memory_fraction", 0.9)
    assert min(0.989, pool / free + 0.05) < fraction < 1
    assert ("free_gpu_memory_fraction" in options) == (pool / free > 0.8)
    sglang = sglang_launch(d)
    assert value(sglang, "--max-total-tokens") == str(options["max_tokens"])
    static = (d.kv.weight_bytes + pool) / d.gpu.memory_bytes
    assert min(0.989, static + 0.05) < float(value(sglang, "--mem-fraction-static")) < 1
    for launch, words in ((sglang, "--max-total-tokens caps"), (trtllm_launch(d), "max_tokens in trtllm.yaml caps")):
        assert message(launch, words)
        assert not message(launch, "is the simulated share")


@pytest.mark.parametrize("launch", [trtllm_launch, sglang_launch])
def test_without_a_cap_the_fraction_is_the_simulated_share(launch):
    d = deployment()
    pool, memory = d.kv.num_blocks * d.kv.kv_bytes_per_block, d.gpu.memory_bytes
    if launch is sglang_launch:
        share, fraction = (d.kv.weight_bytes + pool) / memory, float(value(launch(d), "--mem-fraction-static"))
    else:
        share, options = pool / (memory - d.kv.weight_bytes), yaml.safe_load(trtllm_options(d))["kv_cache_config"]
        fraction = options["free_gpu_memory_fraction"]
        assert "max_tokens" not in options
    assert fraction == pytest.approx(share, abs=1e-3)
    assert message(launch(d), "is the simulated share")


def test_blocks_of_groups_are_handed_on_and_their_absence_too():
    given = deploy("gpt-oss-20b", "H100", num_blocks=2000, limits=EngineLimits(max_model_len=4096))
    assert given.kv.groups is not None
    assert value(vllm_launch(given), "--num-gpu-blocks-override") == "2001"
    assert value(vllm_launch(given), "--disable-hybrid-kv-cache-manager") is None
    planned = deploy("gpt-oss-20b", "H100", limits=EngineLimits(max_model_len=4096))
    assert value(vllm_launch(planned), "--num-gpu-blocks-override") is None
    states = deploy("qwen3-next-80b-a3b", "B200", num_blocks=2000, limits=EngineLimits(max_model_len=4096))
    assert states.kv.block_size == 544
    assert value(vllm_launch(states), "--num-gpu-blocks-override") == "2001"
    full = deploy("gpt-oss-20b", "H100", scheduler=dataclasses.replace(scheduler("vllm_v1"), hybrid_kv_cache=False))
    assert value(vllm_launch(full), "--disable-hybrid-kv-cache-manager") is True
    counts_all = dataclasses.replace(scheduler("vllm_v1"), hybrid_kv_cache=False)
    states = deploy("qwen3-next-80b-a3b", "B200", scheduler=counts_all)  # vLLM cannot cache states as other layers
    assert value(vllm_launch(states), "--disable-hybrid-kv-cache-manager") is None


def test_blocks_that_vllm_refuses_become_larger_ones_of_the_same_cache():
    d = deployment(num_blocks=1000, limits=EngineLimits(block_size=8, max_model_len=4096))
    launch = vllm_launch(d)
    assert value(launch, "--block-size") == "16"
    assert value(launch, "--num-gpu-blocks-override") == "501"
    assert message(launch, "Blocks of 8 tokens")


def test_unchunked_prompts_need_a_budget_for_the_longest():
    d = deployment(scheduler="vllm_v0", limits=EngineLimits(max_num_batched_tokens=2048, max_model_len=8192))
    launch = vllm_launch(d)
    assert value(launch, "--no-enable-chunked-prefill") is True
    assert value(launch, "--max-num-batched-tokens") == "8192"
    assert message(launch, "from 2048 to 8192")
    assert value(sglang_launch(d), "--chunked-prefill-size") == "-1"


def test_reserved_memory_becomes_a_bound_on_the_sequences():
    d = deployment(scheduler="orca", num_blocks=1000, limits=EngineLimits(max_model_len=4096))
    launch = vllm_launch(d)
    assert value(launch, "--max-num-seqs") == "3"  # 1000 blocks, 256 a request
    assert message(launch, "longest sequence", "(3)")


def test_a_step_smaller_than_the_batch_bounds_the_batch():
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=64, max_model_len=4096)
    launch = vllm_launch(deployment(limits=limits))
    assert value(launch, "--max-num-seqs") == "64"
    assert message(launch, "no more sequences than a step has tokens")


@rank
def by_the_moon(now_s):
    """Not something an engine knows."""
    return now_s


@pytest.mark.parametrize("name", sorted(known("rank")))
def test_no_rank_is_dropped_in_silence(name):
    d = deployment(scheduler=Scheduler(rank=name))
    launch = vllm_launch(d)
    stock = name in {"fcfs", "fcfs_preempted_first", "queue_order"}
    assert bool(message(launch, "Requests were ordered by")) != stock
    assert bool(message(sglang_launch(d), "Requests were ordered by")) != stock
    reported = bool(message(launch, "send"))
    assert value(launch, "--scheduling-policy") == ("priority" if reported else "fcfs")


@pytest.mark.parametrize("axis", ["victim", "batching", "memory"])
def test_what_is_not_stock_is_named_or_bounded(axis):
    """Two points of an axis never give the same launch, but for those that mean the same to an engine."""
    stock = {
        "victim": {"latest_admitted"},
        "batching": {"unified", "chunked", "vidur_sarathi"},
        "memory": {"paged_by_chunk"},  # the others' engines keep blocks free by default
    }[axis]
    plain = vllm_launch(deployment())
    for name in known(axis):
        scheduler = dataclasses.replace(deployment().scheduler, **{axis: name})
        launch = vllm_launch(deployment(scheduler=scheduler))
        assert (launch == plain) == (name in stock), name


def test_a_custom_policy_is_noted():
    launch = vllm_launch(deployment(scheduler=Scheduler(rank=by_the_moon)))
    assert message(launch, "by_the_moon (your own)")


@pytest.mark.parametrize("launch", [vllm_launch, sglang_launch])
def test_the_rules_of_another_engine_are_noted(launch):
    made = launch(deployment(scheduler="trtllm"))
    assert message(made, "TensorRT-LLM's rules")
    assert not message(launch(deployment()), "rules")
    # By default prompts are complete. Only a policy leaves memory free.
    if launch is vllm_launch:
        limits = EngineLimits(max_model_len=4096, max_num_batched_tokens=2048)
        made = launch(deployment(scheduler="trtllm", limits=limits))
        assert value(made, "--max-num-batched-tokens") == "2048"
        assert value(made, "--no-enable-chunked-prefill") is None
        assert message(made, "the budget stays at the simulated 2048 tokens")
        assert value(made, "--watermark") == "0"
    else:
        assert value(made, "--chunked-prefill-size") == "-1"


def test_trtllm_computes_prompts_in_one_piece_within_the_simulated_budget():
    limits = EngineLimits(max_model_len=4096, max_num_batched_tokens=2048, block_size=24)
    launch = trtllm_launch(deployment(scheduler="trtllm", limits=limits))
    assert value(launch, "--max_num_tokens") == "2048"
    assert not message(launch, "Prompts were not split")
    assert message(launch, "powers of two from 8 on")
    assert not message(launch, "other rules than")
    assert message(trtllm_launch(deployment(scheduler="sjf")), "other rules than")


@pytest.fixture(scope="module")
def sglang_flags():
    """Flags to what may follow them: nothing, VALUE, or listed words."""
    lines = (Path(__file__).parent / "sglang_flags.txt").read_text().splitlines()
    return {flag: after for flag, _, after in (line.partition(" ") for line in lines if line.startswith("--"))}


@pytest.mark.parametrize("name", sorted(named()))
@pytest.mark.parametrize("dtype", [None, "fp8", "int4", "float16"])
def test_sglang_knows_every_flag_and_word(name, dtype, sglang_flags):
    limits = EngineLimits(max_model_len=4096, weight_dtype=dtype, kv_dtype="fp8" if dtype else None)
    d = deployment(tp=2, scheduler=named()[name], limits=limits, num_blocks=None if dtype else 2000)
    launch = sglang_launch(d)
    for flag in (word for word in launch.command if word.startswith("--")):
        follows, takes = value(launch, flag), sglang_flags[flag]
        assert (follows is True) == (takes == ""), flag
        assert takes in {"", "VALUE"} or follows in takes.split(","), flag


def test_sglang_knows_every_flag_and_word_of_both_sides(sglang_flags):
    launches = sglang_split_launches(deployment(tp=2), deployment(tp=4))
    modes = []
    for launch in launches:
        for flag in (word for word in launch.command if word.startswith("--")):
            follows, takes = value(launch, flag), sglang_flags[flag]
            assert takes in {"", "VALUE"} or follows in takes.split(","), flag
        modes.append(value(launch, "--disaggregation-mode"))
    assert modes == ["prefill", "decode"]


@pytest.mark.parametrize("name", sorted(named()))
@pytest.mark.parametrize("launch", [vllm_launch, sglang_launch, trtllm_launch])
def test_every_named_scheduler_has_a_launch_whose_notes_are_sentences(name, launch):
    made = launch(deployment(scheduler=name))
    assert made.notes
    assert len(set(made.notes)) == len(made.notes)
    assert all(note[-1] in ".)" and "None" not in note for note in made.notes)


def test_swaps_timeouts_small_steps_and_routers_have_notes():
    limits = EngineLimits(max_model_len=4096, max_step_seqs=16, timeout_s=30.0)
    scheduler = Scheduler(preemption_mode="swap", router="central")
    launch = vllm_launch(deployment(replicas=2, limits=limits, scheduler=scheduler))
    assert message(launch, "swapped")
    assert message(launch, "30 s")
    assert message(launch, "At most 16 of 256")
    assert message(launch, "central router", "gateway")


def test_a_multi_node_replica_is_noted_with_the_options_of_each_node():
    launch = vllm_launch(deploy("llama-3.1-405b", "H100", tp=8, pp=2, limits=EngineLimits(max_model_len=4096)))
    assert value(launch, "--nnodes") == "2"
    assert message(launch, "--node-rank")
    assert message(launch, "spans nodes of 8", "with its rank")


def test_a_rack_or_slice_of_several_hosts_is_noted():
    def launch(**options):
        return vllm_launch(deploy("llama-3.1-70b", limits=EngineLimits(max_model_len=4096), **options))

    rack = launch(gpu="GB200", tp=8)
    assert value(rack, "--nnodes") == "2"
    assert message(rack, "spans hosts of 4", "with its rank")
    assert rack.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert not message(launch(gpu="GB200", tp=4), "spans")
    assert not message(launch(gpu="H100", tp=8), "spans")


def test_a_cpu_gets_float32_and_the_cache_in_its_own_variable():
    launch = vllm_launch(deployment(num_blocks=2048), device="cpu")
    assert value(launch, "--dtype") == "float32"
    assert value(launch, "--gpu-memory-utilization") is None
    assert launch.environment == {"VLLM_CPU_KVCACHE_SPACE": "4"}  # 2048 blocks of 2 MiB


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"rank": "srtf"}, ("predicted lengths, which no engine knows", "cannot reach")),
        ({"rank": "aged(weight=3)"}, ("Rank aged(weight=3) orders by predicted lengths",)),
        (
            {"preemption": "is_improvement"},
            ("By the preemption policy is_improvement, waiting requests preempted running ones",),
        ),
        ({"binning": "bins(boundaries=[100])"}, ("gathered by predicted length into batches of",)),
        ({"max_wait_s": 30.0}, ("Requests that had waited 30 s were scheduled before all others",)),
    ],
)
def test_gateway_only_features_are_noted(axes, words):
    d = deployment(scheduler=dataclasses.replace(deployment().scheduler, **axes))
    for launch in (vllm_launch(d), sglang_launch(d)):
        assert message(launch, *words)
        assert not message(vllm_launch(deployment()), *words)


def experts(**options):
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=4096, weight_dtype="fp8")
    return deploy("qwen3-235b-a22b", "H200", limits=limits, **options)


def test_vllm_gets_ranks_and_experts_on_single_gpus():
    launch = vllm_launch(experts(dp=4, ep=8, tp=2, redundant_experts=8, all2all_backend="deepep_low_latency"))
    flags = ("--tensor-parallel-size", "--data-parallel-size", "--enable-expert-parallel", "--all2all-backend")
    assert [value(launch, flag) for flag in flags] == ["2", "4", True, "deepep_low_latency"]
    assert value(launch, "--enable-eplb") is True
    assert json.loads(value(launch, "--eplb-config")) == {"num_redundant_experts": 8}
    assert value(launch, "--max-num-seqs") == "64", "each rank has this limit"
    assert launch.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert message(launch, "tokens of KV cache a rank were planned")
    assert message(vllm_launch(experts(tp=8)), "tokens of KV cache a replica were planned")
    assert not {"--data-parallel-size", "--enable-eplb"} & set(vllm_launch(experts(tp=8, ep=8)).command)
    assert value(vllm_launch(experts(tp=8, ep=8)), "--enable-expert-parallel") is True
    with pytest.raises(InputError, match="ep must be 1 or tp x dp, 8; it is 4"):
        vllm_launch(experts(tp=8, ep=4))


def test_sglang_counts_the_gpus_of_all_ranks_and_divides_limits_by_the_ranks(sglang_flags):
    launch = sglang_launch(experts(dp=4, ep=4, tp=2, scheduler="sglang"))
    flags = ("--tp-size", "--dp-size", "--enable-dp-attention", "--ep-size", "--moe-a2a-backend")
    assert [value(launch, flag) for flag in flags] == ["8", "4", True, "4", None]
    assert value(launch, "--max-running-requests") == str(4 * 64)
    assert value(launch, "--chunked-prefill-size") == str(4 * 1024)
    assert float(value(launch, "--schedule-conservativeness")) == pytest.approx(1 / 0.3, rel=1e-5)
    launch = sglang_launch(experts(dp=8, ep=8, redundant_experts=16, all2all_backend="deepep_high_throughput"))
    for flag in (word for word in launch.command if word.startswith("--")):
        follows, takes = value(launch, flag), sglang_flags[flag]
        assert (follows is True) == (takes == ""), flag
        assert takes in {"", "VALUE"} or follows in takes.split(","), flag
    assert (value(launch, "--moe-a2a-backend"), value(launch, "--deepep-mode")) == ("deepep", "normal")
    assert value(launch, "--ep-num-redundant-experts") == "16"


def test_trtllm_has_ranks_of_one_gpu():
    ranks = experts(dp=8, ep=4, scheduler="trtllm")
    assert value(trtllm_launch(ranks), "--tp_size") == "8"
    options = yaml.safe_load(trtllm_options(ranks))
    assert options["enable_attention_dp"] is True
    assert (options["moe_expert_parallel_size"], options["moe_tensor_parallel_size"]) == (4, 2)
    assert "moe_expert_parallel_size" not in yaml.safe_load(trtllm_options(experts(tp=8)))
    with pytest.raises(InputError, match=r"ranks of one GPU; tp is 2 and dp is 4. Set tp = 1 with dp = 8"):
        trtllm_launch(experts(tp=2, dp=4))
