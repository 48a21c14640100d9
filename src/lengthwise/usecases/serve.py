"""Estimate from a gateway's journal what another order would have gained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lengthwise import config
from lengthwise.gateway import observe
from lengthwise.report.json_file import json_text


def journal_gain(journal: Path, config_file: Path | None, overrides: Sequence[str]) -> observe.Gain:
    """Return what length-aware scheduling would have gained on a journal's traffic."""
    engines = ["http://localhost"] if config_file is None else []  # required, and not contacted
    settings = config.load_gateway(config_file, [*overrides, "listen.journal=null"], engines)
    return observe.report(journal, settings.config.order)


def gain_json(found: observe.Gain) -> str:
    """Return the text of a JSON file of the gain."""
    return json_text("gain", observe.as_json(found))
