"""Print everything behind a figure: python docs/show_results.py FILE [NAME].

FILE is a name in benchmarks/results without its suffix. Without NAME, lists the figures of the file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tables import RESULTS, rows, table


def show(value: object, indent: str = "") -> None:
    """Print a value: records of one shape as a table, mappings as "key: value" lines."""
    if isinstance(value, Mapping):
        if value and all(isinstance(part, Mapping) and _is_flat(part) for part in value.values()):
            keys = list(dict.fromkeys(key for part in value.values() for key in part))
            table(["", *keys], ([name, *(_short(part.get(key)) for key in keys)] for name, part in value.items()))
            return
        for key, part in value.items():
            if isinstance(part, Mapping | list) and part and not (isinstance(part, list) and _is_short(part)):
                print(f"{indent}{key}:")
                show(part, f"{indent}  ")
            else:
                print(f"{indent}{key}: {_short(part)}")
    elif isinstance(value, list) and value and all(isinstance(part, Mapping) for part in value):
        for number, part in enumerate(value):
            print(f"{indent}- {number}")
            show(part, f"{indent}  ")
    elif isinstance(value, list):
        for part in value:
            print(f"{indent}{_short(part)}")
    else:
        print(f"{indent}{_short(value)}")


def _is_flat(part: Mapping[str, Any]) -> bool:
    return not any(isinstance(cell, Mapping) for cell in part.values())


def _is_short(part: Sequence[object]) -> bool:
    return len(part) <= 8 and not any(isinstance(cell, Mapping | list) for cell in part)


def _short(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def main() -> int:
    """Print the figures of a file, or one figure with its details."""
    files = sorted(path.stem for path in RESULTS.glob("*.json"))
    if len(sys.argv) not in (2, 3) or sys.argv[1] not in files:
        print(f"usage: show_results.py FILE [NAME]; FILE must be one of {', '.join(files)}", file=sys.stderr)
        return 2
    found = rows(sys.argv[1])
    if len(sys.argv) == 2:
        lines = ([name, _short(row.get("value")), row.get("unit")] for name, row in found.items())
        table(["figure", "value", "unit"], lines)
        return 0
    if sys.argv[2] not in found:
        print(f"NAME must be one of {', '.join(found)}; got {sys.argv[2]!r}", file=sys.stderr)
        return 2
    show(found[sys.argv[2]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
