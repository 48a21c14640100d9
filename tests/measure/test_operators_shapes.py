"""Operators follow from a model's shapes: names, sharding, degrees that share a shape; no torch."""

import sys

import pytest

from lengthwise import catalog
from lengthwise.measure.operators import measure_operators
from lengthwise.measure.operators.points import Reach, operators_of, unmeasured
from lengthwise.schema.errors import InputError, MissingExtraError
from lengthwise.schema.profile import OPERATOR_PARTS

REACH = Reach(tokens=256, seqs=16, context=512, kv_tokens=4096)


def by_name(model, tps=(1,)):
    return {(one.name, one.tps): one for one in operators_of(model, tps, REACH)}


@pytest.mark.parametrize("name", sorted(catalog.models()))
def test_every_model_of_the_catalog_has_operators_that_profiles_know(name):
    operators = operators_of(catalog.model(name), (1,), REACH)
    assert {one.name for one in operators} <= set(OPERATOR_PARTS)
    assert len({one.key for one in operators}) == len(operators)
    parts = {OPERATOR_PARTS[one.name] for one in operators}
    assert parts == {"layer", "embedding", "head", "host", "prefill", "decode"}


def test_shards_of_the_same_shape_are_measured_once():
    operators = by_name(catalog.model("llama-3-8b"), (1, 2, 4))
    assert ("input norm", (1, 2, 4)) in operators
    assert operators["mlp up", (4,)].shape == {"n": 2 * 14336 // 4, "k": 4096}
    assert operators["decode attention", (2,)].shape == {"heads": 16, "kv_heads": 4, "head_dim": 128}
    assert operators["qkv projection", (1,)].shape["n"] == (32 + 2 * 8) * 128


def test_latent_attention_reads_one_latent():
    operators = {one.name: one for one in operators_of(catalog.model("deepseek-v3"), (8,), REACH)}
    assert operators["decode attention"].shape == {"heads": 16, "kv_heads": 1, "head_dim": 576}
    assert operators["latent projection"].shape["n"] == 1536 + 576
    assert {"router", "experts up", "shared mlp up", "mlp up"} <= set(operators)
    assert operators["experts up"].shape == {"experts": 256, "topk": 8, "n": 256, "k": 7168}
    assert operators["mlp up"].times == 3


def test_windows_are_operators_of_their_own():
    windowed = [m for m in catalog.models().values() if m.attention.windowed_layers]
    assert windowed
    for model in windowed:
        operators = {one.name: one for one in operators_of(model, (1,), REACH)}
        window = operators["decode window attention"]
        assert window.shape["window"] == model.attention.window_tokens
        assert window.largest[2] == min(model.attention.window_tokens, REACH.context)


def test_unmeasured_operators_are_reported():
    crossed = [m for m in catalog.models().values() if m.encoder_layers]
    assert crossed
    assert "cross-attention" in unmeasured(crossed[0])[0]
    assert not unmeasured(catalog.model("llama-3-8b"))


def test_degree_that_does_not_divide_the_heads():
    with pytest.raises(InputError, match=r"tp must divide the 32 attention heads.*Use one of 1, 2, 4"):
        operators_of(catalog.model("llama-3-8b"), (1, 3), REACH)


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"lengthwise\[torch\]"):
        measure_operators(catalog.model("llama-3-8b"))
