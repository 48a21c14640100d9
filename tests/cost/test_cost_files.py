"""Cost tables go to a file and come back; anything else is refused by name."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import catalog
from lengthwise.cost import from_tables, load, roofline, save
from lengthwise.cost.vidur_format import ONCE_A_LAYER
from lengthwise.schema.cost_tables import MERGED, AttentionRule, CostEvidence, Front, PartError
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import OutputError, ProfileError

MODEL = catalog.model("llama-2-7b")
ARRAYS = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s", "stage_layers")


@pytest.fixture(scope="module")
def tables():
    gpu = catalog.gpu("A100-80GB")
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=64)
    made = roofline(MODEL, gpu, catalog.default_node(gpu, 2), Parallelism(1, 2), limits, 256)
    return replace(made, rule=AttentionRule(MERGED, 32, 1.1))


def vidur_arrays():
    ops = {name: np.arange(17.0) for name in ONCE_A_LAYER}
    ops |= {"attn_prefill": np.ones((2, 17)), "attn_decode": np.ones((4, 2)), "send_recv": np.ones(17)}
    for op in ops.values():
        op[0] = np.nan
    return ops


def test_what_is_saved_is_loaded_bit_for_bit(tables, tmp_path):
    path = tmp_path / "mine.npz"
    save(tables, path)
    back = load(path)
    for name in ARRAYS:
        assert np.array_equal(getattr(back, name), getattr(tables, name)), name
        assert getattr(back, name).dtype == getattr(tables, name).dtype
    assert (back.rule, back.evidence.source) == (tables.rule, tables.evidence.source)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.npz"]


def test_saved_tables_and_vidurs_are_distinguished(tables, tmp_path):
    save(tables, tmp_path / "ours.npz")
    np.savez(tmp_path / "theirs.npz", **vidur_arrays())
    assert from_tables(tmp_path / "ours.npz", MODEL, 2).evidence.source == tables.evidence.source
    other = from_tables(tmp_path / "theirs.npz", MODEL, 2)
    assert other.rule.kind == MERGED
    assert other.stage_layers.tolist() == [16, 16]
    assert other.layer_s[[0, 1, 8, 9]] == pytest.approx(np.array([0, 8, 8, 16]) * 8e-3)


def test_a_file_for_other_stages_is_refused(tables, tmp_path):
    save(tables, tmp_path / "ours.npz")
    with pytest.raises(ProfileError, match=r"stages of \[16, 16\] layers; llama-2-7b with pp=1"):
        from_tables(tmp_path / "ours.npz", MODEL, 1)


def test_a_foreign_file_is_refused_with_its_keys(tmp_path):
    np.savez(tmp_path / "other.npz", weights=np.ones(2))
    with pytest.raises(ProfileError, match="its keys are weights"):
        from_tables(tmp_path / "other.npz", MODEL)
    with pytest.raises(ProfileError, match="must hold saved cost tables; it lacks"):
        load(tmp_path / "other.npz")


def test_missing_and_damaged_files_are_named(tables, tmp_path):
    with pytest.raises(ProfileError, match=r"there is no file .*none\.npz"):
        load(tmp_path / "none.npz")
    save(tables, tmp_path / "cut.npz")
    complete = (tmp_path / "cut.npz").read_bytes()
    for length in (0, 10, len(complete) // 2, len(complete) - 30):
        (tmp_path / "cut.npz").write_bytes(complete[:length])
        with pytest.raises(ProfileError, match=r"cut\.npz must be a readable npz"):
            load(tmp_path / "cut.npz")
    np.save(tmp_path / "plain.npy", np.ones(3))
    with pytest.raises(ProfileError, match=r"plain\.npy must be a readable npz"):
        load(tmp_path / "plain.npy")


def test_what_is_no_npz_is_named_for_what_it_is(tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and more")
    with pytest.raises(ProfileError, match=r"it is a Parquet file\. .* profile:.*p\.parquet") as caught:
        from_tables(tmp_path / "p.parquet", MODEL)
    assert "pickle" not in str(caught.value)
    (tmp_path / "t.npz").write_text("layer_s")
    with pytest.raises(ProfileError, match=r"t\.npz must be a readable npz file; it is of another kind"):
        load(tmp_path / "t.npz")
    np.savez(tmp_path / "o.npz", format=np.array([object()]))
    with pytest.raises(ProfileError, match=r"o\.npz .* one of its arrays holds objects$"):
        load(tmp_path / "o.npz")


def test_a_later_version_is_refused(tables, tmp_path, monkeypatch):
    monkeypatch.setattr("lengthwise.cost.tables.VERSION", 2)
    save(tables, tmp_path / "new.npz")
    monkeypatch.undo()
    with pytest.raises(ProfileError, match="must be of version 1; it is of 2"):
        load(tmp_path / "new.npz")


def test_a_front_is_saved_and_a_file_without_one_has_none(tables, tmp_path):
    save(tables, tmp_path / "old.npz")
    assert "front" not in np.load(tmp_path / "old.npz").files
    assert load(tmp_path / "old.npz").front == Front(0.0, 0.0)
    save(replace(tables, front=Front(0.0236, 0.0028)), tmp_path / "new.npz")
    assert load(tmp_path / "new.npz").front == Front(0.0236, 0.0028)
    arrays = dict(np.load(tmp_path / "new.npz")) | {"front": np.zeros(3)}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ProfileError, match="reach and front as they were saved"):
        load(tmp_path / "bad.npz")


def test_an_error_that_leans_to_the_slow_side_is_saved(tables, tmp_path):
    even = (PartError("host", 0.5), PartError("step", 0.1))
    save(replace(tables, evidence=CostEvidence(errors=even)), tmp_path / "even.npz")
    assert "error_slow_log_sd" not in np.load(tmp_path / "even.npz").files
    assert load(tmp_path / "even.npz").evidence.errors == even
    leaning = (*even, PartError("front", 0.7, 1.6))
    save(replace(tables, evidence=CostEvidence(errors=leaning)), tmp_path / "leaning.npz")
    assert load(tmp_path / "leaning.npz").evidence.errors == leaning
    arrays = dict(np.load(tmp_path / "leaning.npz")) | {"error_slow_log_sd": np.zeros(2)}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ProfileError, match="as they were saved"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e-9])
@pytest.mark.parametrize("name", ["layer_s", "decode_s"])
def test_bad_seconds_are_refused_and_nothing_is_written(tables, tmp_path, name, bad):
    table = getattr(tables, name).copy()
    table[(3,) * table.ndim] = bad
    with pytest.raises(ProfileError, match=rf"{name} must be finite and not negative; entry \(3,"):
        save(replace(tables, **{name: table}), tmp_path / "bad.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"comm_s": np.zeros(5)}, "must be of one length"),
        ({"prefill_s": np.zeros(5)}, "prefill_s must have 2 axes"),
        ({"head_s": np.zeros(1), "host_s": np.zeros(1)}, "head_s must have 1 axes of 2 entries"),
        ({"stage_layers": np.array([0])}, "a layer or more a stage"),
        ({"rule": AttentionRule(7)}, "the attention rule must be PER_REQUEST or MERGED"),
        ({"front": Front(serial_s=-1e-3)}, "front must be finite seconds from 0"),
        ({"front": Front(request_s=np.nan)}, "front must be finite seconds from 0"),
    ],
)
def test_tables_of_a_wrong_shape_are_refused(tables, tmp_path, change, message):
    with pytest.raises(ProfileError, match=message):
        save(replace(tables, **change), tmp_path / "bad.npz")


def test_a_place_that_cannot_be_written_is_named(tables, tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        save(tables, tmp_path / "no" / "where.npz")
