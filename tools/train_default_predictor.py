"""Train the shipped predictor: python tools/train_default_predictor.py SHARED [--check].

SHARED is the folder of recorded data. ``--check`` compares with the shipped file instead of writing it. The
bytes follow from the data, the versions of scikit-learn and numpy, which the file names, and the kind of processor.
"""

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lengthwise.predict.evaluation import Evaluation, evaluate
from lengthwise.predict.lexical import Lexical
from lengthwise.predict.sample_files import split
from lengthwise.predict.serialization import save

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the texts are those of the benchmarks
import _texts

SHIPPED = Path(__file__).parents[1] / "src/lengthwise/predict/data/default.lwp"
TRAINED = "2026-11-27"
LICENCE = (
    "Data: sampling reports of github.com/Open-Assistant/oasst-model-eval, Apache-2.0; outputs of Open-Assistant's own "
    "fine-tunes of Pythia 12B, Falcon 7B, Llama 2 13B and Code Llama 13B, none of a commercial provider's model. "
    "The predictor: Apache-2.0."
)
WEAKNESSES = (
    "191 English prompts of everyday use; outputs were cut at 400 tokens, so that longer ones are "
    "extrapolated; no mathematics with long reasoning, no long code, no reasoning models; how long a model that it "
    "has not seen answers on the whole is a guess, the order of its requests is not"
)
SCORES = ("mae", "rmse", "r2", "log_r2", "tau", "tau_within", "accuracy_4", "within_one_4")
SCORES += ("coverage90", "width90", "pinball")


def trained(text: Path) -> tuple[Lexical, dict]:
    """Return the predictor of all the data, and its metadata: scores on prompts held out, and on other models."""
    samples = _texts.shipped(text)
    parts = split(samples, 0.2, 0)
    held_out = evaluate(Lexical().fit(parts.train), parts.test, clock=None, windows=(0,), draws=100)
    predictor = Lexical().fit(samples)
    unseen = _texts.without(_texts.alpaca_eval(text), samples.prompts.text)
    return predictor, {
        "name": "default",
        "trained": TRAINED,
        "license": LICENCE,
        "censored": int(samples.censored.sum()),
        "versions": {name: version(name) for name in ("numpy", "scikit-learn")},
        "held_out": figures(held_out),
        "other_prompts_and_models": figures(evaluate(predictor, unseen, clock=None, windows=(0,), draws=100)),
        "weaknesses": WEAKNESSES,
    }


def figures(found: Evaluation) -> dict[str, list[float]]:
    """Return each score that is known with its half-width."""
    scores = {name: found.scores[name] for name in SCORES if np.isfinite(found.scores[name].value)}
    return {name: [float(f"{one.value:.4g}"), float(f"{one.half_width:.2g}")] for name, one in scores.items()}


def main() -> None:
    """Train the predictor, and write or compare its file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shared", type=Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    predictor, metadata = trained(args.shared / "data/text")
    with tempfile.TemporaryDirectory() as folder:
        made, before = Path(folder) / "default.lwp" if args.check else SHIPPED, SHIPPED.read_bytes()
        save(predictor, made, metadata)
        same = made.read_bytes() == before
    print("the same, byte for byte" if same else "not the same bytes")
    sys.exit(args.check and not same)


if __name__ == "__main__":
    main()
