"""A file of points as they are measured, so that a run that was killed goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lengthwise.measure.operators.points import Operator, Point
from lengthwise.measure.operators.timing import Outcome
from lengthwise.schema.errors import OutputError, ProfileError

_KIND = "lengthwise operators, unfinished"


class Journal:
    """Appends outcomes to a file, a line each, and reads those of before.

    Args:
        path: The file; None keeps nothing.
        asked: What the points belong to: model, shapes, device, dtype, versions. Another file's differ.
        operators: Those that its lines may name.

    Raises:
        ProfileError: The file belongs to another measurement, or is none of ours.
        OutputError: It cannot be written.
    """

    def __init__(self, path: Path | None, asked: Mapping[str, Any], operators: Sequence[Operator]) -> None:
        self.path, self._asked = path, json.loads(json.dumps(dict(asked)))
        self._operators = {one.key: one for one in operators}
        self.before: list[Outcome] = []
        self.spent_s = 0.0
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path)
        else:
            self._append({"kind": _KIND, "version": 1, "asked": self._asked})

    def add(self, outcome: Outcome, spent_s: float) -> None:
        """One more line: what came of a point, and the seconds spent so far."""
        self._append(
            {
                "operator": outcome.point.operator.key,
                "at": outcome.point.at,
                "skew": outcome.point.skew,
                "wall_s": outcome.wall_s,
                "cpu_s": outcome.cpu_s,
                "backend": outcome.backend,
                "skipped": outcome.skipped,
                "spent_s": round(spent_s, 3),
            }
        )

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole, _, torn = text.rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            head = lines[0] if lines else {}
            fits = head.get("kind") == _KIND and head.get("version") == 1
        except (ValueError, AttributeError):
            fits = False
        if not fits:
            raise ProfileError(
                f"{path} is not a file of points that a measurement left; name another or delete it"
            )
        self._require_same(path, head["asked"])
        if torn:  # the process was killed within a line
            with path.open("rb+") as file:
                file.truncate(len(text) - len(torn))
        for line in lines[1:]:
            self._take(line)

    def _require_same(self, path: Path, asked: Mapping[str, Any]) -> None:
        if other := [k for k in {**asked, **self._asked} if asked.get(k) != self._asked.get(k)]:
            told = "; ".join(f"{k}: {asked.get(k)} there, {self._asked.get(k)} now" for k in sorted(other))
            raise ProfileError(
                f"{path} holds points of another measurement ({told}). Give another file or delete it."
            )

    def _take(self, line: Mapping[str, Any]) -> None:
        operator = self._operators.get(line["operator"])
        if operator is None:
            return
        point = Point(operator, tuple(line["at"]), line["skew"])
        wall_s, cpu_s = tuple(line["wall_s"]), tuple(line["cpu_s"])
        self.before.append(Outcome(point, wall_s, cpu_s, line["backend"], line["skipped"]))
        self.spent_s = max(self.spent_s, float(line["spent_s"]))
