"""A profile comes back from its file to the last bit, and what is no profile is refused by name."""

from __future__ import annotations

import json
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.cost.profiles import read_profile, write_profile
from lengthwise.schema.errors import OutputError, ProfileError
from lengthwise.schema.profile import COLUMNS, OPERATOR_PARTS, WHOLE_COLUMNS, Profile, ProfileFacts

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
REALS = st.floats(0, allow_nan=False, allow_infinity=False)
METADATA = st.builds(
    ProfileFacts,
    name=TEXTS,
    source=TEXTS,
    gpu=TEXTS,
    machine=st.dictionaries(TEXTS, TEXTS | st.integers() | REALS | st.none(), max_size=2),
    notes=st.lists(TEXTS, max_size=2).map(tuple),
)


@st.composite
def profiles(draw):
    n = draw(st.integers(1, 5))

    def column(values):
        return draw(st.lists(values, min_size=n, max_size=n))

    columns = {name: np.array(column(TEXTS), dtype=np.str_) for name in ("dtype", "kv_dtype", "backend")}
    columns |= {name: np.array(column(st.integers(0, 2**63 - 1)), dtype=np.int64) for name in WHOLE_COLUMNS}
    columns |= {
        "operator": np.array(column(st.sampled_from(sorted(OPERATOR_PARTS))), dtype=np.str_),
        "seconds": np.array(column(REALS)),
        "spread_s": np.array(column(REALS | st.just(math.nan))),
        "skew": np.array(column(REALS)),
    }
    return Profile(draw(METADATA), columns)


@given(profiles())
def test_a_profile_comes_back_to_the_last_bit(tmp_path_factory, profile):
    path = tmp_path_factory.mktemp("round") / "trip.parquet"
    write_profile(profile, path)
    back = read_profile(path)
    assert back.metadata == profile.metadata
    for name in COLUMNS:
        assert back[name].tobytes() == profile[name].tobytes() or back[name].dtype.kind == "U", name
        assert np.array_equal(back[name], profile[name], equal_nan=back[name].dtype.kind == "f"), name


def one():
    return Profile(ProfileFacts("p", "lengthwise", "H100"), {"operator": ["host"], "seconds": [1e-6]})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.parquet"):
        read_profile(tmp_path / "none.parquet")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OutputError, match="create it first"):
        write_profile(one(), tmp_path / "no" / "p.parquet")


def test_another_parquet_file_is_refused(tmp_path):
    pl.DataFrame({"a": [1]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ProfileError, match="another Parquet file"):
        read_profile(tmp_path / "a.parquet")


@pytest.mark.parametrize("data", [b"", b"operator,seconds\nhost,1\n", b"PAR1 and then nothing"])
def test_what_is_no_parquet_is_refused(tmp_path, data):
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(ProfileError, match="must be a profile of lengthwise"):
        read_profile(tmp_path / "a.parquet")


def test_a_cut_off_file_is_refused(tmp_path):
    write_profile(one(), tmp_path / "a.parquet")
    complete = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(complete[: len(complete) // 2])
    with pytest.raises(ProfileError, match="damaged"):
        read_profile(tmp_path / "a.parquet")


def rewritten(tmp_path, version=1, **columns):
    about = {"version": version, "metadata": {"name": "n", "source": "s", "gpu": "g"}}
    frame = pl.DataFrame({"operator": ["host"], "seconds": [1.0]} | columns)
    frame.write_parquet(tmp_path / "a.parquet", metadata={"lengthwise.profile": json.dumps(about)})
    return tmp_path / "a.parquet"


def test_a_profile_without_rows_is_neither_written_nor_read(tmp_path):
    with pytest.raises(ProfileError, match=r"profile p must hold a measured point or more"):
        write_profile(one().where(np.array([False])), tmp_path / "p.parquet")
    assert not (tmp_path / "p.parquet").exists()
    empty = {"operator": pl.Series([], dtype=pl.String), "seconds": pl.Series([], dtype=pl.Float64)}
    with pytest.raises(ProfileError, match=r"a\.parquet must hold a measured point or more"):
        read_profile(rewritten(tmp_path, **empty))


def test_a_newer_version_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="of version 2"):
        read_profile(rewritten(tmp_path, version=2))


def test_rows_with_holes_are_refused(tmp_path):
    with pytest.raises(ProfileError, match="seconds lacks some"):
        read_profile(rewritten(tmp_path, seconds=pl.Series([None], dtype=pl.Float64)))


def test_an_unknown_operator_is_refused_with_the_file_s_name(tmp_path):
    with pytest.raises(ProfileError, match=r"a\.parquet.*turbo encabulator"):
        read_profile(rewritten(tmp_path, operator=["turbo encabulator"]))


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.parquet"
    write_profile(one(), path)
    before = path.read_bytes()
    bad = Profile(ProfileFacts("p", "s", "g", machine={"x": object()}), dict(one().columns))
    with pytest.raises(ProfileError, match="JSON-able"):
        write_profile(bad, path)
    assert path.read_bytes() == before
