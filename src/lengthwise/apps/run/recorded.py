"""What a run's folder holds of answers, model by model."""

from __future__ import annotations

import json
from pathlib import Path

from lengthwise.apps.run.exporting import OUTPUTS


def recorded(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """(answers, output tokens) that were written, by model's name; empty where there is no file of answers."""
    answers: dict[str, int] = {}
    tokens: dict[str, int] = {}
    path = folder / OUTPUTS
    if path.is_file():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                told = json.loads(line)
                name = told["model"]
                answers[name] = answers.get(name, 0) + 1
                tokens[name] = tokens.get(name, 0) + told["output_tokens"]
    return answers, tokens
