"""Numbers on a terminal never come with an exponent."""

from __future__ import annotations

import pytest

from lengthwise.cli.tables import two_digits


@pytest.mark.parametrize(
    ("value", "shown"),
    [(104.2, "104"), (99.6, "100"), (23.4, "23"), (9.96, "10"), (3.21, "3.2"), (0.0123, "0.012"), (0, "0")],
)
def test_two_digits_stay_plain(value, shown):
    assert two_digits(value) == shown
