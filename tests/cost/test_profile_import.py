"""Importers: every unit and convention of the sources, on files small enough to reckon by hand."""

from __future__ import annotations

import numpy as np
import pytest
from imported_rows import rows

from lengthwise import catalog
from lengthwise.cost.profiles import import_llmservingsim, import_vidur
from lengthwise.schema.errors import ProfileError

LLAMA = catalog.model("llama-2-7b")


def csv(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")


# Vidur: milliseconds, bytes, KV tokens a sequence


def vidur(root):
    shape = "n_head,n_kv_head,n_embd,n_expanded_embd,use_gated_mlp,num_tokens,num_tensor_parallel_workers"
    csv(
        root / "compute/a100/meta-llama/Llama-2-7b-hf/mlp.csv",
        f"""time_stats.mlp_up_proj.median,time_stats.mlp_up_proj.std,time_stats.add.median,{shape}
        0.5,0.01,0.004,32,32,4096,11008,True,8,1
        0.3,0.02,0.004,32,32,4096,11008,True,8,2
        9.9,0.02,0.004,64,64,8192,28672,True,8,2""",
    )
    csv(
        root / "compute/a100/meta-llama/Llama-2-7b-hf/attention.csv",
        """time_stats.attn_prefill.median,time_stats.attn_decode.median,n_embd,n_q_head,n_kv_head,block_size,"""
        """num_tensor_parallel_workers,batch_size,prefill_chunk_size,kv_cache_size,is_prefill,profile_method
        0.2,,4096,32,32,16,2,1,64,128,True,SURROGATE
        ,0.1,4096,32,32,16,2,4,0,256,False,KINETO""",
    )
    network = "num_workers,devices_per_node,max_devices_per_node,size"
    csv(
        root / "network/a100_dgx/all_reduce.csv",
        f"""time_stats.all_reduce.median,{network}
        0.02,4,4,8,8192
        0.90,4,1,8,8192""",
    )
    csv(
        root / "network/a100_dgx/send_recv.csv",
        f"""time_stats.send_recv.median,{network}
        0.01,2,2,8,4096
        0.80,2,1,8,4096""",
    )
    return root


def test_vidur_is_in_milliseconds_and_bytes(tmp_path):
    profile = import_vidur(vidur(tmp_path), LLAMA, "a100")
    assert rows(profile, "mlp up", "tp", "tokens", "seconds") == [(1, 8, 0.5e-3), (2, 8, 0.3e-3)]
    assert rows(profile, "mlp up", "spread_s")[0] == pytest.approx((1.349e-5,))
    assert np.isnan(profile.of("residual add")["spread_s"]).all()
    assert rows(profile, "all-reduce", "tp", "gpus", "bytes", "seconds") == [(0, 4, 8192, 0.02e-3)]
    assert rows(profile, "send", "gpus", "bytes", "seconds") == [(2, 4096, 0.01e-3)]
    assert (profile.metadata.gpu, profile.metadata.model) == ("A100-80GB", "llama-2-7b")


def test_vidur_s_attention_counts_cached_tokens_a_sequence(tmp_path):
    profile = import_vidur(vidur(tmp_path), LLAMA, "A100-80GB", keep_surrogates=True)
    prefill = rows(profile, "prefill attention", "tp", "seqs", "chunk", "context", "seconds")
    assert prefill == [(2, 1, 64, 128, 0.2e-3)]
    decode = rows(profile, "decode attention", "tp", "seqs", "kv_tokens", "skew", "seconds")
    assert decode == [(2, 4, 1024, 1.0, 0.1e-3)]


def test_vidur_notes_name_made_up_rows_and_omissions(tmp_path):
    notes = " | ".join(import_vidur(vidur(tmp_path), LLAMA, "a100").metadata.notes)
    assert "1 attention rows (tp 2) are marked SURROGATE: made up, not measured, and left out" in notes
    assert "1 all_reduce rows between nodes are left out" in notes
    assert "1 send_recv rows between nodes are left out" in notes


def test_vidur_s_made_up_rows_are_left_out_unless_requested(tmp_path):
    measured = import_vidur(vidur(tmp_path), LLAMA, "a100")
    assert rows(measured, "prefill attention", "tp") == []
    assert rows(measured, "decode attention", "tp") == [(2,)]
    assert measured.made_up("decode attention") == ()
    retained = import_vidur(tmp_path, LLAMA, "a100", keep_surrogates=True)
    assert rows(retained, "prefill attention", "tp") == [(2,)]
    assert retained.made_up("prefill attention") == (2,)
    assert "and kept" in " ".join(retained.metadata.notes)


def test_vidur_without_attention_or_network_is_imported_with_a_note(tmp_path):
    vidur(tmp_path)
    (tmp_path / "compute/a100/meta-llama/Llama-2-7b-hf/attention.csv").unlink()
    (tmp_path / "network").rename(tmp_path / "elsewhere")
    profile = import_vidur(tmp_path, LLAMA, "a100")
    assert set(profile.operators) == {"mlp up", "residual add"}
    assert "has no attention.csv" in " ".join(profile.metadata.notes)
    assert "no all-reduce and no send" in " ".join(profile.metadata.notes)


def test_vidur_errors_list_what_is_present(tmp_path):
    vidur(tmp_path)
    with pytest.raises(ProfileError, match="it holds a100"):
        import_vidur(tmp_path, LLAMA, "h100")
    with pytest.raises(ProfileError, match="meta-llama/Llama-2-7b-hf"):
        import_vidur(tmp_path, catalog.model("llama-3-8b"), "a100")
    with pytest.raises(ProfileError, match="must be a folder with compute/"):
        import_vidur(tmp_path / "none", LLAMA, "a100")
    with pytest.raises(ProfileError, match=rf"Give the folder that holds compute/, which is {tmp_path}"):
        import_vidur(tmp_path / "compute", LLAMA, "a100")


def test_absurd_times_are_noted(tmp_path):
    vidur(tmp_path)
    path = tmp_path / "compute/a100/meta-llama/Llama-2-7b-hf/mlp.csv"
    path.write_text(path.read_text().replace("0.5,0.01", "0.0000000001,0.01").replace("0.3,0.02", "0.001,0.02"))
    notes = " | ".join(import_vidur(tmp_path, LLAMA, "a100").metadata.notes)
    assert "1 rows take less than 10 ns: is the unit right? (mlp up" in notes
    assert "1 rows are more than 10 times faster than the device's peak (mlp up" in notes


# LLMServingSim v0: layers in nanoseconds, attention in milliseconds, keys of the whole batch


def test_llmservingsim_v0_adds_up_projections_and_reads_nanoseconds(tmp_path):
    root = tmp_path / "H100" / "meta-llama" / "Llama-3.1-8B"
    names = {"q_proj": 3000, "k_proj": 1000, "v_proj": 500, "gate_proj": 7000, "up_proj": 6000, "expert.w1": 9}
    lines = "\n".join(f"{name},16,0,2,{ns}" for name, ns in names.items())
    csv(root / "tp2/layers.csv", f"layer_name,input,kv_cache,tp_size,latency(ns)\n{lines}\nattn,16,0,2,8000")
    profile = import_llmservingsim(root)
    assert rows(profile, "qkv projection", "tp", "tokens", "seconds") == [(2, 16, 4500e-9)]
    assert rows(profile, "mlp up", "tokens", "seconds") == [(16, 13000e-9)]
    assert rows(profile, "prefill attention", "chunk", "context", "seconds") == [(16, 0, 8000e-9)]
    assert "expert.w1 (1)" in " ".join(profile.metadata.notes)
    assert (profile.metadata.gpu, profile.metadata.model) == ("H100", "llama-3.1-8b")
    assert profile.metadata.source == "llmservingsim v0"


def test_llmservingsim_v0_s_keys_count_the_batch_and_include_the_chunk(tmp_path):
    root = tmp_path / "A6000" / "meta-llama" / "Llama-3.1-8B"
    stats = ",".join(f"time_stats.attn_{k}.{s}" for k in ("prefill", "decode") for s in ("median", "std"))
    csv(
        root / "tp1/attention.csv",
        f"""{stats},is_prefill,prefill_chunk_size,kv_cache_size,batch_size,attention_backend
        0.06,0.001,,,True,512,1536,1,FLASH_ATTENTION
        ,,0.05,0.002,False,0,1000,64,FLASH_ATTENTION
        ,,0.002,0.002,False,0,32,64,FLASH_ATTENTION""",
    )
    csv(root / "tp1/layers.csv", "layer_name,input,latency(ns)\nrope,1,5")
    profile = import_llmservingsim(root)
    prefill = rows(profile, "prefill attention", "chunk", "context", "seconds", "backend")
    assert prefill == [(512, 1024, pytest.approx(0.06e-3), "FLASH_ATTENTION")]
    assert rows(profile, "decode attention", "seqs", "kv_tokens", "seconds") == [(64, 960, pytest.approx(0.05e-3))]
    assert "1 decode rows have fewer keys than sequences" in " ".join(profile.metadata.notes)


def test_llmservingsim_v0_on_a_tpu_counts_keys_a_sequence(tmp_path):
    root = tmp_path / "TPU-v6e-1" / "meta-llama" / "Llama-3.1-8B"
    csv(
        root / "tp1/attention.csv",
        """prefill_chunk_size,kv_cache_size,batch_size,is_prefill,p50_ns
        512,64,1,True,70000
        0,100,8,False,90000""",
    )
    csv(root / "tp1/layers.csv", "layer_name,input,latency(ns)\nrope,1,500")
    profile = import_llmservingsim(root)
    assert rows(profile, "prefill attention", "chunk", "context", "seconds") == [(512, 64, 70e-6)]
    assert rows(profile, "decode attention", "seqs", "kv_tokens", "seconds") == [(8, 800, 90e-6)]


# LLMServingSim v1: microseconds a call; skew.csv sums its calls


def v1(root, skew_us="30.3"):
    root.mkdir(parents=True)
    (root / "meta.yaml").write_text(
        "vllm_version: 0.19.0\ngpu: NVIDIA RTX PRO 6000 Blackwell Server Edition\nhardware: RTXPRO6000\n"
        "model: meta-llama/Llama-3.1-8B\nvariant: bf16\nmeasurement_iterations: 3\n"
        "profiled_at: '2026-04-24T12:44:27+00:00'\n"
    )
    csv(root / "tp1/dense.csv", "layer,tokens,time_us\nlayernorm,4,2.5\nqk_norm,4,2.0\nconv,4,1.0")
    csv(root / "tp1/per_sequence.csv", "layer,sequences,time_us\nlm_head,8,700\nsampler,8,25")
    csv(root / "tp1/moe.csv", "tokens,activated_experts,time_us\n4,16,50")
    csv(
        root / "tp1/attention.csv",
        """prefill_chunk,kv_prefill,n_decode,kv_decode,time_us
        64,128,0,0,20
        0,0,4,512,10
        64,128,4,512,35""",
    )
    csv(
        root / "tp1/skew.csv",
        f"""regime,n,nb,pc,kp,kvs,kv_big,t_mean_us,t_max_us,t_skew_us
        pure,4,1,0,0,128,512,24.0,{skew_us},27.0
        mixed,4,2,16,32,128,512,54.0,90.0,60.0""",
    )
    return root


def test_llmservingsim_v1_is_in_microseconds(tmp_path):
    profile = import_llmservingsim(v1(tmp_path / "bf16"))
    for norm in ("input norm", "post-attention norm"):
        assert rows(profile, norm, "tokens", "seconds", "repeats") == [(4, pytest.approx(2.5e-6), 3)]
    assert rows(profile, "norms", "seconds") == [(pytest.approx(4e-6),)]
    assert rows(profile, "lm head", "tokens", "seconds") == [(8, pytest.approx(700e-6))]
    assert rows(profile, "moe block", "tokens", "experts", "seconds") == [(4, 16, pytest.approx(50e-6))]
    assert "conv (1)" in " ".join(profile.metadata.notes)
    assert (profile.metadata.gpu, profile.metadata.model) == ("RTX-PRO-6000", "llama-3.1-8b")
    assert (profile.metadata.engine, profile.metadata.measured) == ("vLLM 0.19.0", "2026-04-24")


def test_llmservingsim_v1_s_attention_is_pure_or_mixed(tmp_path):
    profile = import_llmservingsim(v1(tmp_path / "bf16"))
    assert rows(profile, "prefill attention", "seqs", "chunk", "context") == [(1, 64, 128)]
    even, skewed = rows(profile, "decode attention", "seqs", "kv_tokens", "skew", "seconds")
    assert even == (4, 2048, 1.0, pytest.approx(10e-6))
    assert skewed == (4, 896, pytest.approx(512 * 4 / 896), pytest.approx(9e-6))  # 27 us are three calls
    mixed = rows(profile, "mixed attention", "chunk", "context", "seqs", "kv_tokens", "seconds")
    assert mixed[0] == (64, 128, 4, 2048, pytest.approx(35e-6))
    assert mixed[1] == (16, 32, 4, 1280, pytest.approx(20e-6))


@pytest.mark.parametrize(("uniform_us", "calls"), [("10.1", 1), ("29.5", 3), ("55.0", 0)])
def test_skewed_times_are_scaled_as_the_even_ones_show(tmp_path, uniform_us, calls):
    decode = import_llmservingsim(v1(tmp_path / "bf16", uniform_us)).of("decode attention")
    assert len(decode) == 1 + (calls > 0)
    if calls:
        assert decode["seconds"][1] == pytest.approx(27e-6 / calls)


def test_llmservingsim_errors_list_what_is_present(tmp_path):
    root = v1(tmp_path / "bf16")
    with pytest.raises(ProfileError, match="it holds bf16"):
        import_llmservingsim(tmp_path)
    (root / "meta.yaml").unlink()
    with pytest.raises(ProfileError, match=r"meta\.yaml"):
        import_llmservingsim(root)


def test_a_missing_column_is_named(tmp_path):
    root = v1(tmp_path / "bf16")
    csv(root / "tp1/dense.csv", "layer,tokens,seconds\nlayernorm,4,2.5")
    with pytest.raises(ProfileError, match=r"dense\.csv must have the columns time_us; it has layer"):
        import_llmservingsim(root)
