"""Vidur's recorded iterations follow from its tables."""

import gzip
import json

import numpy as np
import pytest

from lengthwise.cost import vidur_tables
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.specs import AttentionSpec, FfnSpec, ModelSpec

LLAMA_7B = ModelSpec("7b", 32, 4096, 32000, AttentionSpec(32, 32, 128), FfnSpec(11008), 4096)
LLAMA_70B = ModelSpec("70b", 80, 8192, 32000, AttentionSpec(64, 8, 128), FfnSpec(28672), 4096)
CASES = [
    ("g02_70b_tp2_sarathi512_conv_q0.9", "tables_Llama-2-70b-hf_tp2_pp1", LLAMA_70B, 1),
    ("g03_70b_tp2pp2_sarathi512_arxiv_q0.8", "tables_Llama-2-70b-hf_tp2_pp2", LLAMA_70B, 2),
    ("g06_7b_tp1_vllm_conv_q4.4", "tables_Llama-2-7b-hf_tp1_pp1", LLAMA_7B, 1),
    ("g07_7b_tp1_sarathi512_uniform_4rep_rr_q20", "tables_Llama-2-7b-hf_tp1_pp1", LLAMA_7B, 1),
    ("g10_7b_tp1_ft_fixed128_64_q10", "tables_Llama-2-7b-hf_tp1_pp1", LLAMA_7B, 1),
]


def stage_times(tables, batch):
    """[PP] seconds of a recorded batch, by the words of schema/cost_tables.py."""
    rule = tables.rule
    rows = list(zip(batch["num_tokens"], batch["is_prefill"], batch["kv_before"], strict=True))
    tokens = sum(n for n, _, _ in rows)
    prompts = [(n, -(-kv // rule.step_tokens)) for n, prefill, kv in rows if prefill]
    contexts = [kv for _, prefill, kv in rows if not prefill]
    attention = 0.0
    if prompts:
        chunk = round(np.sqrt(sum(n * n for n, _ in prompts)))
        merged = rule.merge_factor if len(prompts) > 1 else 1.0
        attention += merged * tables.prefill_s[chunk, sum(kv for _, kv in prompts)]
    if contexts:
        mean = -(-int(np.mean(contexts)) // rule.step_tokens)
        merged = rule.merge_factor if len(contexts) > 1 else 1.0
        attention += merged * tables.decode_s[len(contexts), mean]
    layer = tables.layer_s[tokens] + tables.comm_s[tokens] + attention
    send = tables.send_s[tokens]
    last = len(tables.stage_layers) - 1
    return [n * layer + send * (stage != last) for stage, n in enumerate(tables.stage_layers)]


@pytest.mark.parametrize(("case", "npz", "model", "pp"), CASES)
def test_recorded_iterations_recompose(shared, case, npz, model, pp):
    tables = vidur_tables(shared(f"golden/vidur/{npz}.npz"), model, pp)
    with gzip.open(shared(f"golden/vidur/{case}.json.gz")) as file:
        batches = json.load(file)["first_iterations_detail"]
    assert len(batches) == 400
    for batch in batches:
        recorded = [seconds for _, _, seconds in batch["stages"]]
        np.testing.assert_allclose(stage_times(tables, batch), recorded, rtol=1e-12)


def test_no_tokens_cost_nothing_and_nothing_is_nan(shared):
    tables = vidur_tables(shared("golden/vidur/tables_Llama-2-70b-hf_tp2_pp2.npz"), LLAMA_70B, 2)
    for name in ("layer_s", "comm_s", "send_s", "prefill_s", "decode_s"):
        table = getattr(tables, name)
        assert np.isfinite(table).all(), name
        assert not table[0].any(), name
    assert tables.stage_layers.tolist() == [40, 40]


def test_missing_operator_is_named(tmp_path):
    np.savez(tmp_path / "part.npz", attn_rope=np.zeros(3))
    with pytest.raises(ProfileError, match=r"part\.npz must hold attn_pre_proj.*it holds attn_rope"):
        vidur_tables(tmp_path / "part.npz", LLAMA_7B)


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no npz")
    with pytest.raises(ProfileError, match=r"bad\.npz must be a readable npz"):
        vidur_tables(tmp_path / "bad.npz", LLAMA_7B)


def test_stages_must_divide_the_layers(tmp_path):
    np.savez(tmp_path / "part.npz", attn_rope=np.zeros(3))
    with pytest.raises(ProfileError, match="pp must divide the 32 layers"):
        vidur_tables(tmp_path / "part.npz", LLAMA_7B, 5)
