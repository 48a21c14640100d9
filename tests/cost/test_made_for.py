"""A file of cost tables keeps what it is of, and is refused for anything else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import catalog, cost, deploy
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import ProfileError

MODEL, GPU = "llama-3-8b", "H100"


def own(**changed):
    """What tables of a deployment are of, which differs from the usual one in ``changed``."""
    return cost.MadeFor.of_deployment(deploy(**{"model": MODEL, "gpu": GPU, **changed}))


def test_provenance_is_read_back_and_leaves_the_tables_unchanged(tmp_path):
    tables = deploy(MODEL, GPU).cost
    cost.save(tables, tmp_path / "told.npz", own())
    cost.save(tables, tmp_path / "again.npz", own())
    cost.save(tables, tmp_path / "untold.npz")
    assert cost.made_for(tmp_path / "told.npz") == own()
    assert cost.made_for(tmp_path / "untold.npz") is None
    assert np.array_equal(cost.load(tmp_path / "told.npz").layer_s, tables.layer_s)
    assert (tmp_path / "told.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"replicas": 4}, []),
        ({"model": replace(catalog.model(MODEL), vocab=128_258)}, []),
        ({"model": "mistral-7b"}, ["the model llama-3-8b, not mistral-7b (vocab 128256 for"]),
        ({"limits": EngineLimits(max_num_seqs=8)}, []),
        ({"model": replace(catalog.model(MODEL), name="a fine-tune of it")}, []),
        ({"gpu": "A100-80GB"}, ["the GPU H100, not A100-80GB"]),
        ({"tp": 2}, ["tp 1, not 2"]),
        ({"pp": 2}, ["pp 1, not 2"]),
        ({"model": "llama-2-7b"}, ["the model llama-3-8b, not llama-2-7b (intermediate 14336 for 11008"]),
        ({"limits": EngineLimits(weight_dtype="fp8")}, ["weights of bfloat16, not fp8"]),
        ({"limits": EngineLimits(kv_dtype="fp8")}, ["a KV cache of bfloat16, not fp8"]),
        ({"gpu": "L4", "tp": 2}, ["the GPU ", "tp 1, not 2"]),
    ],
)
def test_seconds_hold_for_one_model_gpu_degree_and_data_type(changed, words, tmp_path):
    path = tmp_path / "c.npz"
    cost.save(deploy(MODEL, GPU).cost, path, own())
    requested = own(**changed)
    assert len(own().differences(requested)) == len(words)
    if not words:
        cost.require_made_for(path, requested)
        return
    with pytest.raises(ProfileError) as reported:
        cost.require_made_for(path, requested)
    assert all(word in str(reported.value) for word in words), str(reported.value)
    assert "lengthwise calibrate" in str(reported.value)


def test_the_node_counts_for_several_gpus():
    one, two = own(tp=2), own(tp=2)
    assert one.differences(two) == []
    assert one.differences(replace(two, node="another")) == [f"the node {one.node}, not another"]
    assert own().node == ""


def test_a_deployment_of_another_model_takes_no_such_tables(tmp_path):
    path = tmp_path / "c.npz"
    cost.save(deploy(MODEL, GPU).cost, path, own())
    deploy(MODEL, GPU, cost=f"tables:{path}")
    other = replace(catalog.model(MODEL), hidden=2048, name="small")  # of as many layers
    with pytest.raises(ProfileError, match=r"not small \(hidden 4096 for 2048\)"):
        deploy(other, GPU, cost=f"tables:{path}")


@pytest.mark.parametrize("text", ["not json", "[1]", "{}", json.dumps({"model": "of no shape"})])
def test_malformed_provenance_is_refused(text, tmp_path):
    path = tmp_path / "c.npz"
    cost.save(deploy(MODEL, GPU).cost, path)
    with np.load(path) as retained:
        np.savez(path, **{**retained, "made_for": text})
    with pytest.raises(ProfileError, match="must name the deployment of its tables"):
        cost.made_for(path)
