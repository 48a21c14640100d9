"""An answer that is cut within a character goes on from before it: engines hold half a character back."""

from __future__ import annotations

import pytest

from lengthwise.apps.launch.engine import Draft
from lengthwise.apps.ledger.contracts import Partial
from lengthwise.backend.openai_protocol import Chunk


def drafted(*pieces, before=None):
    draft = Draft.of(before)
    draft.fixed_prefix = (len(draft.text), len(draft.output_ids))
    for text, *ids in pieces:
        draft.append(Chunk(0.0, text, len(ids), True, None, None, tuple(ids), (7,)))
    return draft.partial()


@pytest.mark.parametrize(
    ("pieces", "text", "ids"),
    [
        ([("a", 1), ("b", 2)], "ab", (1, 2)),
        ([("a", 1), ("", 2)], "a", (1,)),
        ([("a", 1), ("", 2), ("\ufffdQ", 3)], "a\ufffdQ", (1, 2, 3)),
        ([("a", 1), ("bc", 2, 3)], "a", (1,)),
        ([("a", 1), ("bc", 2, 3), ("d", 4)], "abcd", (1, 2, 3, 4)),
        ([("a", 1), ("", 2), ("bc", 3, 4)], "a", (1,)),
    ],
)
def test_the_saved_part_ends_where_text_and_tokens_agree(pieces, text, ids):
    assert drafted(*pieces) == Partial(text, (7,), ids)


def test_nothing_is_saved_before_the_first_text():
    assert drafted(("", 1)) is None
    assert drafted(("ab", 1, 2)) is None


def test_an_earlier_saved_part_stays():
    before = Partial("a", (7,), (1,))
    assert drafted(("", 2), before=before) == before
    assert drafted(("", 2), ("c", 3), before=before) == Partial("ac", (7,), (1, 2, 3))
    assert drafted(("cd", 2, 3), before=before) == before
