"""What dense masks cost goes to a file and comes back; files without it have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.cost import load, save
from lengthwise.engine import deploy
from lengthwise.schema.errors import ProfileError


@pytest.fixture(scope="module")
def tables():
    return deploy("llama-2-7b", "A100-80GB").cost


def test_masks_are_saved_and_a_file_without_them_has_none(tables, tmp_path):
    save(tables, tmp_path / "old.npz")
    assert "masked_s" not in np.load(tmp_path / "old.npz").files
    assert load(tmp_path / "old.npz").masked_s == 0.0
    save(replace(tables, masked_s=3.1e-8), tmp_path / "new.npz")
    assert load(tmp_path / "new.npz").masked_s == 3.1e-8
    np.savez(tmp_path / "bad.npz", **(dict(np.load(tmp_path / "new.npz")) | {"masked_s": np.zeros(2)}))
    with pytest.raises(ProfileError, match="as they were saved"):
        load(tmp_path / "bad.npz")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e-9])
def test_bad_seconds_of_masks_are_refused_and_nothing_is_written(tables, tmp_path, bad):
    with pytest.raises(ProfileError, match="masked_s must be finite seconds from 0"):
        save(replace(tables, masked_s=bad), tmp_path / "bad.npz")
    assert list(tmp_path.iterdir()) == []
