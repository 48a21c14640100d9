"""The report on a profile: its gaps, its share of the data sheet, and what moved since an older one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.cost.profiles import check_profiles, describe_profile
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.profile import Profile, ProfileFacts

METADATA = ProfileFacts("p", "lengthwise", "H100", "llama-3-8b")
TOKENS = 2 ** np.arange(14)  # 1 to 8,192


def shard(operator="mlp up", tokens=TOKENS, *, noise=0.0, seed=0, spread=np.nan, **columns):
    """Times that grow by the square root of the tokens, each off by its noise."""
    rng = np.random.default_rng(seed)
    seconds = 1e-5 * np.sqrt(tokens) * np.exp(rng.normal(0, noise, len(tokens)))
    given = {"operator": [operator] * len(tokens), "tokens": tokens, "tp": [1] * len(tokens), "seconds": seconds}
    given |= {"spread_s": spread * seconds, "dtype": ["bfloat16"] * len(tokens)}
    return Profile(METADATA, given | columns)


def joined(*profiles):
    return replace(profiles[0], columns={n: np.concatenate([p[n] for p in profiles]) for n in profiles[0].columns})


def gaps_of(profile):
    return [str(gap) for view in describe_profile(profile).operators for gap in view.gaps]


def test_a_grid_that_doubles_has_no_gaps():
    assert gaps_of(shard()) == []


def test_gaps_are_between_points_and_beyond_them():
    found = gaps_of(shard(tokens=np.array([4, 8, 100, 200])))
    assert found == ["tokens 1 to 3", "tokens 9 to 99", "tokens 201 to 8,192"]


def test_gaps_of_the_head_are_in_sequences():
    assert gaps_of(shard("lm head", np.array([1, 2, 4]))) == ["sequences 5 to 256"]


def attention(kind, x, y):
    x, y = (grid.ravel() for grid in np.meshgrid(x, y))
    axes = {"chunk": x, "context": y} if kind == "prefill" else {"seqs": x, "kv_tokens": x * y}
    n = len(x)
    return Profile(METADATA, {"operator": [f"{kind} attention"] * n, "tp": [1] * n, "seconds": [1e-5] * n} | axes)


def test_attention_over_its_complete_plane_has_no_gaps():
    grid = 2 ** np.arange(14)
    assert gaps_of(attention("prefill", grid, np.array([0, *grid]))) == []
    assert gaps_of(attention("decode", grid[:9], grid)) == []


def test_gaps_of_attention_are_cells_of_its_plane_joined():
    grid = 2 ** np.arange(14)
    assert gaps_of(attention("decode", grid[:5], grid)) == ["sequences 17 to 256 with mean context 0 to 8,192"]
    missing = gaps_of(attention("prefill", grid, grid[:7]))
    assert missing == ["chunk 1 to 8,192 with context 65 to 8,192"]


def test_steps_that_no_request_can_have_are_no_gap():
    """A chunk of 8,192 after a context of 8,192 is too long for a model of 8,192 tokens."""
    grid = 2 ** np.arange(14)
    complete = attention("prefill", grid, np.array([0, *grid]))
    fits = complete.where(complete["chunk"] + complete["context"] <= catalog.model("llama-3-8b").max_model_len)
    assert gaps_of(fits) == []


def test_the_share_of_the_data_sheet_is_that_of_flops_or_of_bytes():
    """An MLP's up-projection of 4,096 by 28,672 at half of each peak."""
    gpu = catalog.gpu("H100")
    tokens, flops = np.array([1, 8192]), 2 * 8192 * 4096 * 28672
    weights = 2 * 4096 * 28672 + 2 * (4096 + 28672)
    seconds = np.array([2 * weights / gpu.bandwidth_bytes_per_s, 2 * flops / gpu.flops("bfloat16")])
    for row, field in ((0, "bandwidth"), (1, "flops")):
        one = shard(tokens=tokens[[row]], seconds=seconds[[row]])
        share = describe_profile(one).operators[0].best
        assert getattr(share, field) == pytest.approx(0.5, rel=1e-6)
        assert share.roofline == pytest.approx(0.5, rel=1e-6)


def test_rows_of_an_unknown_device_have_no_share():
    view = describe_profile(replace(shard(), metadata=replace(METADATA, gpu="an abacus")))
    assert view.work is None
    assert view.operators[0].median is None


def test_a_profile_agrees_with_itself():
    profile = shard()
    found = check_profiles(profile, profile)
    assert found.changed == ()
    assert found.unmatched == 0
    assert {row.ratio for row in found.rows} == {1.0}


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_nothing(seed):
    tokens = np.arange(1, 300)
    old, new = shard(tokens=tokens, noise=0.05, seed=seed), shard(tokens=tokens, noise=0.05, seed=seed + 100)
    assert check_profiles(new, old, seed=seed).changed == ()


def test_a_planted_slowdown_is_found_where_it_is():
    tokens = np.arange(1, 300)
    old = joined(*(shard(name, tokens, noise=0.05, seed=i) for i, name in enumerate(("mlp up", "rope"))))
    slow = shard("rope", tokens, noise=0.05, seed=7)
    slow = replace(slow, columns=slow.columns | {"seconds": slow["seconds"] * np.where(tokens > 20, 1.2, 1.0)})
    found = check_profiles(joined(shard("mlp up", tokens, noise=0.05, seed=6), slow), old)
    assert [(row.operator, row.region) for row in found.changed] == [("rope", "large")]
    moved = found.changed[0]
    assert moved.low < 1.2 < moved.high
    assert (moved.unit, moved.points, moved.sizes) == ("tokens", 282, (18, 299))


def test_what_became_faster_moved_as_well():
    old = shard(tokens=np.arange(1, 300))
    new = replace(old, columns=old.columns | {"seconds": old["seconds"] / 1.2})
    assert {row.region for row in check_profiles(new, old).changed} == {"small", "large"}
    assert check_profiles(new, old, tolerance=0.25).changed == ()


def test_what_the_spreads_explain_did_not_move():
    tokens = TOKENS[:3]
    old = shard(tokens=tokens, spread=0.5)
    new = replace(old, columns=old.columns | {"seconds": old["seconds"] * 1.2})
    assert check_profiles(new, old).changed == ()
    sure = replace(old, columns=old.columns | {"spread_s": old["seconds"] * 0.001})
    assert check_profiles(replace(new, columns=new.columns | {"spread_s": sure["spread_s"]}), sure).changed


def test_points_between_two_old_ones_are_compared_with_their_interpolation():
    between = np.array([3, 6, 12, 24, 48, 96])
    found = check_profiles(shard(tokens=between), shard(tokens=TOKENS))
    assert sum(row.points for row in found.rows) == 6
    assert all(row.ratio == pytest.approx(1.0, abs=1e-9) for row in found.rows)  # a power law is exact
    far = check_profiles(shard(tokens=np.array([1, 3, 50])), shard(tokens=np.array([1, 100, 200])))
    assert (sum(row.points for row in far.rows), far.unmatched) == (1, 2)


def test_attention_is_interpolated_along_its_context():
    old = attention("prefill", np.array([64, 128]), np.array([256, 512]))
    old = replace(old, columns=old.columns | {"seconds": 1e-8 * old["chunk"] * old["context"]})
    new = attention("prefill", np.array([64, 96]), np.array([300]))
    new = replace(new, columns=new.columns | {"seconds": 1e-8 * new["chunk"] * new["context"]})
    found = check_profiles(new, old)
    assert (found.rows[0].points, found.unmatched) == (1, 1)
    assert found.rows[0].ratio == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_intervals():
    old, new = shard(noise=0.1), shard(noise=0.1, seed=1)
    assert check_profiles(new, old, seed=3) == check_profiles(new, old, seed=3)


def test_shards_are_compared_with_their_own():
    old = joined(shard(), shard(tp=[2] * len(TOKENS)))
    slow = old["seconds"] * np.where(old["tp"] == 2, 1.3, 1.0)
    found = check_profiles(replace(old, columns=old.columns | {"seconds": slow}), old)
    assert {row.tp for row in found.changed} == {2}


def test_what_cannot_be_compared_is_refused():
    old = shard()
    with pytest.raises(ProfileError, match="of one model; they are of llama-3-70b and llama-3-8b"):
        check_profiles(replace(old, metadata=replace(METADATA, model="llama-3-70b")), old)
    with pytest.raises(ProfileError, match="of one dtype; they are of float16 and bfloat16"):
        check_profiles(shard(dtype=["float16"] * len(TOKENS)), old)
    with pytest.raises(ProfileError, match="share a TP degree; one has TP 2, the other TP 1"):
        check_profiles(shard(tp=[2] * len(TOKENS)), old)
    with pytest.raises(ProfileError, match="of one kind"):
        check_profiles(shard("gemm", tp=[0] * len(TOKENS)), old)
    with pytest.raises(ProfileError, match="share points"):
        check_profiles(shard("rope"), old)
    with pytest.raises(InputError, match="above 0"):
        check_profiles(old, old, tolerance=0)


def test_attention_of_another_backend_is_refused_unless_a_name_is_part_of_the_other():
    def by(backend):
        rows = attention("decode", np.array([1, 2, 4]), np.array([64, 128]))
        return replace(rows, columns=rows.columns | {"backend": np.full(len(rows), backend)})

    with pytest.raises(ProfileError, match="decode attention is of FLASHINFER in one, of FLASH_ATTN in the other"):
        check_profiles(by("FLASHINFER"), by("FLASH_ATTN"))
    for now, then in (("FLASH_ATTN_FA3", "FLASH_ATTN"), ("", "FLASH_ATTN"), ("FLASH_ATTN", "FLASH_ATTN")):
        assert check_profiles(by(now), by(then)).rows


def test_another_device_is_noted():
    found = check_profiles(replace(shard(), metadata=replace(METADATA, gpu="H200")), shard())
    assert found.notes == ("the GPU differs: H200 (new), H100 (old)",)
