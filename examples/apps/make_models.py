"""Make the models of the tiny examples: random weights, so that their outputs are noise, while serving them is real.

Runs in the environment of the engine, which has torch and transformers, and needs no internet:

    make engine
    .engines/vllm/bin/python examples/apps/make_models.py [FOLDER]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
MAKE_MODEL = FOLDER.parents[1] / "src/lengthwise/gateway/demo/engine_side/make_model.py"
SIZES = {"alder": "tiny", "birch": "small", "cedar": "medium"}
"""5, 27 and 84 million parameters; models/*.json are their shapes for the planner."""


def main(place: Path) -> None:
    """Writes alder, birch and cedar there; git ignores those in models."""
    made = runpy.run_path(str(MAKE_MODEL))
    tokenizer = made["tokenizer"]()
    for name, size in SIZES.items():
        folder = str(place / name)
        made["model"](size).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER / "models")
