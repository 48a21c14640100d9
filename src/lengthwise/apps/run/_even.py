"""When a replica joins late, the others have all the work; what can go on from its tokens is shared anew."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.apps.run._work import Berth, Work

LEAST = 8
"""Fewer requests are not worth reading their tokens again."""


def uneven(berths: Sequence[Berth]) -> list[tuple[Work, Berth]]:
    """Requests to be moved, and where they are: those that began last of engines that have twice as much as another.

    Half of the difference goes, so that nothing is moved to and fro.
    """
    open_ = [berth for berth in berths if berth.inquiry is None]
    if len(open_) < 2:
        return []
    least = min(len(berth.going) for berth in open_)
    mean = sum(len(berth.going) for berth in open_) / len(open_)
    moved = []
    for berth in open_:
        going = len(berth.going)
        if going >= 2 * least and going - least >= LEAST:
            more = max(0, going - round(mean))
            movable = [work for work in reversed(berth.going.values()) if _can_move(work)]
            moved += [(work, berth) for work in movable[:more]]
    return moved


def _can_move(work: Work) -> bool:
    """Whether nothing that was written is lost by it."""
    draft = work.draft
    asked = work.asking is not None and not work.asking.done()
    return asked and (draft.partial() is not None or not any(draft.text))
