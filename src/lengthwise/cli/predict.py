"""``lengthwise predict``: train, eval, collect, show and serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from lengthwise.cli import outputs
from lengthwise.cli.options import HtmlReport, JsonFile
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.predict import Evaluation, Samples

EXAMPLES = """\b
Examples:
  lengthwise predict show default --prompt "Write an essay about rivers."
  lengthwise predict train log.jsonl --out mine.lwp
  lengthwise predict eval mine.lwp other-models.jsonl --report lengths.html
  lengthwise predict serve mine.lwp --port 8140
"""

_SampleFiles = Annotated[
    list[Path],
    Argument(metavar="FILE...", help="JSONL, CSV or Parquet of requests with outputs, a serving log, or a trace."),
]
_DefaultModel = Annotated[str | None, Option("--model", help="Name of the model of rows that do not name one.")]
_PredictorFile = Annotated[str, Argument(metavar="PREDICTOR", help="An output file of `predict train`, or default.")]

_MIN_SAMPLES = 100
_CARD_SCORES = (
    "mae", "rmse", "r2", "tau", "tau_within", "accuracy_4", "within_one_4", "coverage90", "width90", "pinball"
)  # fmt: skip


def train(
    files: _SampleFiles,
    *,
    out: Annotated[Path, Option(metavar="FILE", help="File of the predictor, usually NAME.lwp.")],
    kind: Annotated[
        str, Option(help="lexical, encoder, ecdf, buckets, constant or in_session.", metavar="KIND")
    ] = "lexical",
    test_share: Annotated[float, Option(min=0.0, max=0.9, help="Share of the prompts that is held out.")] = 0.2,
    seed: Annotated[int, Option(min=0, help="Seed of the split and of the training.")] = 0,
    conformal: Annotated[bool, Option("--conformal", help="Calibrate its quantiles on held-out lengths.")] = False,
    model: _DefaultModel = None,
) -> None:
    """Train a predictor, evaluate it on held-out prompts, and write it to a file."""
    from lengthwise import predict
    from lengthwise.predict.sample_files import SIMILARITY
    from lengthwise.usecases import predict as usecase

    usecase.check_kind(kind)
    outputs.require_writable([out], files)
    samples = usecase.read_samples(files, kind, model=model)
    for line in notes(samples):
        typer.echo(line)
    trained = usecase.train(samples, kind, test_share=test_share, seed=seed, conformal=conformal)
    if trained.evaluation is not None and (parts := trained.split) is not None:
        print_scores(
            [trained.evaluation], f"{kind}: trained on {trained.samples:,} samples, {len(parts.test):,} held out"
        )
        if parts.near_duplicates:
            kind_of_line, use = ("warning", "they count") if parts.includes_near_duplicates else ("note", "left out")
            resemble = f"resemble a training prompt (bigram Jaccard of {SIMILARITY} or more)"
            typer.echo(f"{kind_of_line}: {parts.near_duplicates:,} held-out prompts {resemble}: {use}")
    else:
        reason = "nothing was held out" if test_share == 0 else "without prompts nothing can be held out"
        typer.echo(f"{kind}: trained on {trained.samples:,} samples; {reason}")
    predict.save(trained.predictor, out, trained.metadata)
    typer.echo(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB)")


def notes(samples: Samples) -> list[str]:
    """Return a line for each property of the samples that may be a mistake."""
    n, metadata = len(samples), samples.metadata
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in metadata.get("unknown_finish", {}).items())
    keys = ", ".join(f"{key} (did you mean {name}?)" for key, name in metadata.get("misspelt", {}).items())
    without_prompt, left_out = metadata.get("no_prompt", 0), metadata.get("left_out", 0)
    estimated = metadata.get("estimated_tokens", 0)
    lines = {
        f"note: {without_prompt:,} of {n:,} rows have no prompt": without_prompt,
        f"note: unknown keys: {keys}": keys,
        f"note: unknown finish reasons, treated as regular stops: {reasons}": reasons,
        f"note: output tokens of {estimated:,} of {n:,} rows were estimated from the text": estimated,
        f"note: {left_out:,} rows failed or are empty, and are left out": left_out,
        f"warning: {n:,} samples are few to train on; below {_MIN_SAMPLES} the scores are unreliable": n < _MIN_SAMPLES,
    }
    return [line for line, applies in lines.items() if applies]


def evaluate(
    predictor_file: _PredictorFile,
    files: _SampleFiles,
    *,
    report: HtmlReport = None,
    json: JsonFile = None,
    seed: Annotated[int, Option(min=0, help="Seed of the intervals.")] = 0,
    model: _DefaultModel = None,
) -> None:
    """Evaluate a predictor on samples that it has not seen, overall and file by file."""
    from lengthwise import predict
    from lengthwise.report.predict import predict_json, write_predict_html
    from lengthwise.schema.files import write_atomic
    from lengthwise.usecases import predict as usecase

    outputs.require_outputs(json, report, files)
    predictor = _open(predictor_file)
    unique = len({file.name for file in files}) == len(files)
    groups = {file.name if unique else str(file): [file] for file in files}
    if len(files) > 1:
        groups = {"all": list(files), **groups}
    found = [
        predict.evaluate(predictor, usecase.read_samples(group, predictor.kind, model=model), name=name, seed=seed)
        for name, group in groups.items()
    ]
    metadata = getattr(predictor, "metadata_", {})
    if json != outputs.STDOUT:
        print_scores(found, f"{predictor_file} on {', '.join(map(str, files))}")
    heading = f"Predicted lengths: {predictor_file}"
    outputs.write_outputs(
        json,
        report,
        found,
        lambda path, found: write_atomic(path, predict_json(found, metadata).encode()),
        lambda path, found: write_predict_html(path, found, metadata, heading=heading),
    )


def print_scores(found: Sequence[Evaluation], title: str) -> None:
    """Print the scores, one column per evaluation, and the first evaluation's scores by tokens generated so far."""
    from lengthwise.cli.tables import print_properties, print_table
    from lengthwise.report.predict import WORDS, r2_text, repredictions, score_text, warnings

    for one in found:
        details = [f"{one.requests:,} requests, {one.prompts:,} prompts"]
        if one.censoring.samples:
            details.append(f"{one.censoring.samples:,} outputs ({100 * one.censoring.share:.3g} %) were cut")
        if one.latency_ms:
            details.append(", ".join(f"{ms:.3f} ms a prompt at batch {n}" for n, ms in one.latency_ms.items()))
        print_properties(title if one is found[0] else "", [(one.name, "; ".join(details))])
        for line in warnings(one):
            typer.echo(f"warning: {line}")
    rows = [
        [WORDS[name], *(score_text(name, one.scores[name].value, one.scores[name].half_width) for one in found)]
        for name in _CARD_SCORES
        if any(name in one.scores for one in found)
    ]
    print_table(("score", *(one.name if len(found) > 1 else "value" for one in found)), rows, wraps=())
    windows = found[0].windows
    if len(windows) > 1:
        typer.echo("")
        reads = found[0].reads_output is not None
        rows = [
            [f"{w.tokens:,}", f"{w.running:,}", f"{w.mae.value:,.0f}", *([f"{w.mae_conditioned:,.0f}"] * reads),
             r2_text(w.r2.value), f"{w.tau.value:.2f}", f"{100 * w.coverage90.value:.0f} %", r2_text(w.r2_all)]
            for w in windows
        ]  # fmt: skip
        heads = ["tokens so far", "still running", "MAE", *(["by survival"] * reads), "R2", "tau", "90 % cover"]
        print_table((*heads, "R2 of all"), rows)
        typer.echo(repredictions(found[0]))


def _open(source: str) -> Any:
    """Load a predictor. Raises InputError for an unknown file, with a hint if the name resembles "default"."""
    import difflib

    from lengthwise.predict.serialization import NAME, opened

    path = Path(source)
    if not path.exists() and not path.suffix and source != NAME and difflib.get_close_matches(source.lower(), [NAME]):
        raise InputError(f"there is no predictor file {source}; did you mean: {NAME}?")
    return opened(source)


def collect(
    prompts: Annotated[Path, Argument(metavar="FILE", help="Prompts: JSONL, CSV, Parquet, or text, one a line.")],
    *,
    url: Annotated[str, Option(help="An OpenAI-compatible server, such as http://localhost:8000/v1.")],
    model: Annotated[str, Option(help="The model's name at the server.")],
    out: Annotated[Path, Option(metavar="FILE", help="JSONL that answers are appended to.")],
    max_tokens: Annotated[int | None, Option(min=1, help="Limit of an output.")] = None,
    temperature: Annotated[float | None, Option(min=0.0, help="Sampling temperature.")] = None,
    concurrency: Annotated[int, Option(min=1, help="Concurrent requests.")] = 8,
) -> None:
    """Collect a running server's answers to prompts as training data.

    The same command continues an interrupted run. The environment variable OPENAI_API_KEY may hold a key.
    """
    import os

    from lengthwise.backend import collect as backend
    from lengthwise.predict import read_prompts

    texts = read_prompts(prompts)
    endpoint = backend.Endpoint(url, model, max_tokens, temperature, os.environ.get("OPENAI_API_KEY"))
    found = backend.collect(texts, out, endpoint, concurrency=concurrency)
    typer.echo(f"{found.done:,} answered, {found.skipped:,} existed, {found.failed:,} failed: {out}")
    if found.failed:
        raise InputError(f"{found.failed:,} of {len(texts):,} prompts were not answered; the first: {found.reason}")


def show(
    predictor_file: _PredictorFile = "default",
    *,
    prompt: Annotated[str | None, Option(help="Show the predicted distribution for this prompt.")] = None,
    model: Annotated[str | None, Option("--model", help="The model that answers the prompt.")] = None,
    tokens_so_far: Annotated[int, Option(min=0, help="Tokens generated so far.")] = 0,
) -> None:
    """Show a predictor and its training data, or its prediction for a prompt."""
    predictor = _open(predictor_file)
    if prompt is None:
        _show_card(predictor, f"{predictor_file}: a predictor of kind {predictor.kind}")
    else:
        _show_prediction(predictor, prompt, model, tokens_so_far)


def _show_card(predictor: Any, title: str) -> None:
    import math

    from lengthwise.cli.tables import print_properties, print_table
    from lengthwise.report.predict import WORDS, score_text

    def text(value: Any) -> str:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value:,}"
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)

    metadata = dict(getattr(predictor, "metadata_", {}) or {})
    heads = {"held_out": "on held-out prompts", "other_prompts_and_models": "on other prompts and models"}
    evaluations = {head: metadata.pop(key) for key, head in heads.items() if metadata.get(key)}
    metadata["versions"] = [f"{name} {number}" for name, number in (metadata.get("versions") or {}).items()]
    order = ("sources", "samples", "prompts", "models", "censored", "trained", "versions", "license", "weaknesses")
    keys = [*(key for key in order if key in metadata), *sorted(set(metadata) - set(order))]
    properties = [(key.replace("_", " "), text(metadata[key])) for key in keys if not isinstance(metadata[key], dict)]
    print_properties(title, properties)
    if evaluations:
        rows = [
            [WORDS[name], *(score_text(name, *scores.get(name, (math.nan,))) for scores in evaluations.values())]
            for name in _CARD_SCORES
            if any(name in scores for scores in evaluations.values())
        ]
        print_table(("score", *evaluations), rows, wraps=())


def _show_prediction(predictor: Any, prompt: str, model: str | None, tokens_so_far: int) -> None:
    import numpy as np

    from lengthwise.cli.tables import print_properties, print_table
    from lengthwise.predict import Prompts
    from lengthwise.predict.features import is_mathematics

    models = None if model is None else [model]
    predicted = predictor.predict(Prompts(1, text=[prompt], model=models), np.array([tokens_so_far]))
    known = model is None or getattr(predictor, "knows_model", lambda _: True)(model)
    print_properties(
        "Output tokens in total" + (f", given {tokens_so_far:,} generated" if tokens_so_far else ""),
        [
            ("model", "" if model is None else model if known else f"{model} (unknown to the predictor)"),
            ("mean", f"{predicted.mean[0]:,.0f} tokens"),
            ("median", f"{predicted.median[0]:,.0f} tokens"),
            ("90 % interval", f"{predicted.quantile(0.05)[0]:,.0f} to {predicted.quantile(0.95)[0]:,.0f} tokens"),
        ],
    )
    if is_mathematics(prompt):
        typer.echo("note: this prompt is mathematical; predictors order such prompts badly without such training data")
    tokens = {level: float(predicted.quantile(level)[0]) for level in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)}
    width = 32 / max(tokens.values())
    rows = [[f"{100 * level:g} %", f"{t:,.0f}", "█" * max(1, round(width * t))] for level, t in tokens.items()]
    print_table(("quantile", "tokens", ""), rows)


def serve(
    predictor_file: _PredictorFile = "default",
    *,
    host: Annotated[str, Option(help="Address; no client needs a key. 0.0.0.0: all networks.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: a free one.")] = 8140,
    statistic: Annotated[str, Option(help="Statistic that is a hint: mean, median, p80 or p90.")] = "mean",
    learn: Annotated[
        bool, Option("--learn/--no-learn", help="Whether reported lengths correct later predictions.")
    ] = True,
    short_below: Annotated[int, Option(min=1, help="SHORT: a length below this many tokens is likely.")] = 500,
    long_from: Annotated[int, Option(min=1, help="LONG: a length of at least this many tokens is likely.")] = 2000,
    bin_confidence: Annotated[float, Option(help="The probability that is likely; above 0.5.")] = 0.8,
) -> None:
    """Serve predicted lengths over HTTP to another router (POST /v1/lengths), and hints (POST /v1/hints/ROUTER).

    Routers are dynamo, kserve, llm-d, production-stack and smg. Lengths reported to /v1/lengths/observed correct later
    predictions. /health, /ready and /metrics are those of a service.
    """
    from lengthwise.gateway.serve import require_extra

    require_extra("lengthwise predict serve")
    from lengthwise.gateway import length_server
    from lengthwise.gateway.config import PredictionConfig

    _open(predictor_file)
    config = length_server.LengthServerConfig(
        PredictionConfig(predictor=predictor_file, statistic=statistic, learn=learn),
        length_server.Bins(short_below, long_from, bin_confidence),
    )
    at = f"[{host}]" if ":" in host else host

    def announce(used: int) -> None:
        typer.echo(f"lengths at http://{at}:{used}/v1/lengths, predictor {predictor_file} (Ctrl-C ends it)")

    length_server.serve(config, host, port, announce)
