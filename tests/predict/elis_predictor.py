"""ELIS' predictor (Sections 3.2 and 4.2), with which benchmarks compare ours: a frozen encoder and eight layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from lengthwise.predict import LengthDistribution, Prompts, Samples
from lengthwise.predict.contract import with_output
from lengthwise.predict.encoder import SentenceEncoder
from lengthwise.predict.evaluation import WINDOWS
from lengthwise.predict.sample_files import split

SIZES, LEARNING_RATE, BATCH, EPOCHS, WINDOW_TOKENS = [*[1024] * 7, 1], 1e-4, 16, 16, 50
ENDS = 64  # tokens of a text that the encoder reads at its beginning, and at its end


class ElisPredictor:
    """Eight fully connected layers on the encoder's mean of all tokens so far and the window's index.

    They learn the remaining tokens in every window; the epoch counts that is best on a fifth of the prompts.
    """

    def __init__(self, folder: Path, epochs: int = EPOCHS) -> None:
        self.encoder, self.epochs = SentenceEncoder(folder, layers=6, cache_size=100_000), epochs

    def inputs(self, prompts: Prompts, index: np.ndarray) -> Any:
        texts = zip(prompts.text, prompts.output_so_far or [""] * len(prompts), strict=True)
        vectors = self.encoder.embed([f"{prompt}\n{output}".strip() for prompt, output in texts], ENDS, ENDS)
        return torch.tensor(np.column_stack([vectors[:, vectors.shape[1] // 2 :], index]), dtype=torch.float32)

    def windows(self, samples: Samples) -> tuple[Any, Any]:
        """Return inputs, and remaining tokens, of each window that a sample reaches."""
        so_far = [tokens for tokens in WINDOWS if tokens < samples.output_tokens.max()]
        rows = [np.flatnonzero(samples.output_tokens > tokens) for tokens in so_far]
        parts, so_far = samples.take(np.concatenate(rows)), np.repeat(so_far, [len(of) for of in rows])
        prompts = with_output(parts.prompts, parts.output, parts.output_tokens, so_far)
        rest = torch.tensor(parts.output_tokens - so_far, dtype=torch.float32)
        return self.inputs(prompts, so_far // WINDOW_TOKENS), rest

    def fit(self, samples: Samples, seed: int = 0) -> ElisPredictor:
        parts, rng = split(samples, 0.2, seed), np.random.default_rng(seed)
        (x, y), (x_checked, y_checked) = self.windows(parts.train), self.windows(parts.test)
        torch.manual_seed(seed)
        self.rows, self.middle, self.spread, self.unit, best = len(x), x.mean(0), x.std(0) + 1e-6, y.mean(), np.inf
        pairs = zip([x.shape[1], *SIZES], SIZES, strict=False)
        layers = [part for pair in pairs for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
        self.network = torch.nn.Sequential(*layers[:-1])
        optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE, fused=True)
        for epoch in range(self.epochs):
            for rows in np.array_split(rng.permutation(len(x)), -(-len(x) // BATCH)):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.rest(x[rows]) / self.unit, y[rows] / self.unit).backward()
                optimizer.step()
            with torch.no_grad():
                error = float(((self.rest(x_checked) - y_checked) ** 2).mean())
            if error < best:
                best, self.best_epoch = error, epoch + 1
                state = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(state)
        return self

    def rest(self, x: Any) -> Any:
        return self.network((x - self.middle) / self.spread)[:, 0] * self.unit

    def predict(self, prompts: Prompts, tokens_so_far: int | np.ndarray = 0) -> LengthDistribution:
        so_far = np.broadcast_to(np.asarray(tokens_so_far), len(prompts))
        rest = self.rest(self.inputs(prompts, so_far // WINDOW_TOKENS)).detach().numpy()
        return LengthDistribution.point(so_far + np.maximum(rest, 1.0))
