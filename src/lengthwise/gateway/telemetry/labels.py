"""Names as label values, of which there are never more than so many."""

from __future__ import annotations

OTHER = "other"


class Labels:
    """The first ``most`` names that come keep their own; all others are "other".

    Whoever may send any name would else make as many time series as he likes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """The label of a name; learns it while there is room."""
        label = self._known.get(name)
        if label is None:
            if len(self._known) >= self._most:
                return OTHER
            label = self._known[name] = name[:128]
        return label

    def known(self, name: str) -> str:
        """The label of a name that has been learnt, else "other"."""
        return self._known.get(name, OTHER)
