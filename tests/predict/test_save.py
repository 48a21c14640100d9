"""A saved predictor comes back as it was, and a bad file is recognized."""

from __future__ import annotations

import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from known_lengths import Misled, world

from lengthwise.predict import (
    BucketEcdf,
    Conditional,
    Conformal,
    Constant,
    Ecdf,
    Ensemble,
    Guarded,
    Prompts,
    load,
    save,
)
from lengthwise.schema.errors import InputError, OutputError, UnknownNameError

SAMPLES = world(600)
STRANGERS = Prompts(2, ["", "new"], np.array([1, 10**7]), ["?", "b"])
PREDICTORS = {
    "constant": Constant(),
    "given": Constant(7),
    "ecdf": Ecdf(),
    "buckets": BucketEcdf(by=("model", "prompt_chars"), buckets=3),
    "conditional": Conditional(Ecdf()),
    "nested": Conformal(Ensemble([Constant(), BucketEcdf(), Conditional(Ecdf())])),
    "guarded": Guarded(BucketEcdf(), Constant(3)),
}


def same(one, other):
    for prompts in (SAMPLES.prompts, STRANGERS):
        for age in (0, 120):
            np.testing.assert_array_equal(one.predict(prompts, age).tokens, other.predict(prompts, age).tokens)


@pytest.mark.parametrize("name", PREDICTORS)
def test_round_trip(name, tmp_path):
    predictor = PREDICTORS[name].fit(SAMPLES)
    save(predictor, tmp_path / "x.lwp", metadata={"data": "made up"})
    loaded = load(tmp_path / "x.lwp")
    assert type(loaded) is type(predictor)
    assert loaded.metadata_ == {"data": "made up"}
    same(loaded, predictor)
    save(loaded, tmp_path / "y.lwp")
    assert (tmp_path / "x.lwp").read_bytes() == (tmp_path / "y.lwp").read_bytes()


def test_a_loaded_conformal_goes_on_observing(tmp_path):
    save(Conformal(Ecdf()).fit(SAMPLES), tmp_path / "x.lwp")
    loaded = load(tmp_path / "x.lwp")
    before = loaded.predict(Prompts(1)).mean[0]
    loaded.observe(SAMPLES.prompts, SAMPLES.output_tokens * 4)
    assert loaded.predict(Prompts(1)).mean[0] > 1.5 * before


@pytest.fixture
def good(tmp_path):
    save(BucketEcdf().fit(SAMPLES), tmp_path / "good.lwp")
    return tmp_path / "good.lwp"


def rewritten(path, change_meta=lambda meta: None, arrays=None):
    """The file with another meta.json or other arrays."""
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    meta = json.loads(parts["meta.json"])
    change_meta(meta)
    parts["meta.json"] = json.dumps(meta).encode()
    if arrays is not None:
        numbers = io.BytesIO()
        np.savez(numbers, **arrays)
        parts["arrays.npz"] = numbers.getvalue()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return path


def test_no_file(tmp_path):
    with pytest.raises(InputError, match="there is no predictor file"):
        load(tmp_path / "none.lwp")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.9, -1])
def test_truncated(good, keep):
    data = good.read_bytes()
    good.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match="damaged"):
        load(good)


@pytest.mark.parametrize("at", range(30, 1500, 130))
def test_a_flipped_byte_is_noticed_or_harmless(good, at):
    data = bytearray(good.read_bytes())
    data[at % len(data)] ^= 0xFF
    good.write_bytes(bytes(data))
    try:
        loaded = load(good)
    except InputError:
        return
    same(loaded, BucketEcdf().fit(SAMPLES))


def test_another_format(good):
    with pytest.raises(InputError, match=r"format 1; it is of 99, written by lengthwise"):
        load(rewritten(good, lambda meta: meta.update(format=99)))


def test_an_unknown_kind(good):
    with pytest.raises(UnknownNameError, match="bucket_ecdf"):
        load(rewritten(good, lambda meta: meta.update(kind="bucket_edcf")))
    with pytest.raises(UnknownNameError):
        load(rewritten(good, lambda meta: meta.update(kind="os:system")))


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.pop("state"),
        lambda meta: meta["state"].pop("cells"),
        lambda meta: meta["state"].update(cells=[[0, 0]]),
        lambda meta: meta["state"].update(by=["nonsense"]),
        lambda meta: meta["state"].update(buckets="many"),
        lambda meta: meta["state"].update(models=None),
        lambda meta: meta.update(state=[]),
    ],
)
def test_a_state_that_is_not_one(good, change):
    with pytest.raises(InputError) as caught:
        load(rewritten(good, change))
    assert "good.lwp" in str(caught.value) + "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((3, 25)),
        np.full((3, 25), np.nan),
        np.ones((3, 24)),
        np.ones(25),
        np.ones((1, 25)),
        np.tile(np.arange(25, 0, -1.0), (3, 1)),
        np.array([["a"]]),
    ],
    ids=["zeros", "nan", "columns", "flat", "rows", "falling", "text"],
)
def test_arrays_that_are_not_quantiles(good, table):
    arrays = {"table": table, "cuts_prompt_tokens": np.array([1.0])}
    with pytest.raises(InputError, match="table"):
        load(rewritten(good, arrays=arrays))


def test_a_pickle_is_never_opened(good, tmp_path):
    class Boom:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    evil = {"table": np.array([Boom()], dtype=object)}
    with pytest.raises(InputError, match=r"damaged|pickle"):
        load(rewritten(good, arrays=evil))
    good.write_bytes(pickle.dumps(Boom()))
    with pytest.raises(InputError, match="damaged"):
        load(good)
    assert not (tmp_path / "owned").exists()


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(InputError, match="Misled has not"):
        save(Misled(), tmp_path / "x.lwp")
    with pytest.raises(InputError, match="fit"):
        save(Ecdf(), tmp_path / "x.lwp")
    with pytest.raises(OutputError):
        save(Constant(3), tmp_path / "no" / "x.lwp")
    assert list(tmp_path.iterdir()) == []


def _patched(path, at_local, at_central, value):
    """The file with a byte of every header of its zip changed."""
    data = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", at_local), (b"PK\x01\x02", at_central)):
        place = data.find(mark)
        while place >= 0:
            data[place + at] = value
            place = data.find(mark, place + 4)
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("at_local", "at_central", "value"),
    [(6, 8, 1), (8, 10, 99), (4, 6, 99)],
    ids=["encrypted", "unknown compression", "a version to come"],
)
def test_a_zip_that_cannot_be_opened_is_one_clear_error(good, at_local, at_central, value):
    _patched(good, at_local, at_central, value)
    with pytest.raises(InputError, match="must be a complete file written by `save`"):
        load(good)


@pytest.mark.parametrize("shape", ["(17592186044416,)", "(3,)", "(-2, -2)"])
def test_an_array_with_a_false_shape_is_refused(good, shape):
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    lie = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(32)
    with zipfile.ZipFile(good) as file:
        meta = file.read("meta.json")
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("table.npy", lie)
    with zipfile.ZipFile(good, "w") as file:
        file.writestr("meta.json", meta)
        file.writestr("arrays.npz", inner.getvalue())
    with pytest.raises(
        InputError, match=r"must be a complete file written by `save`|must be as it was written|must be finite"
    ):
        load(good)
