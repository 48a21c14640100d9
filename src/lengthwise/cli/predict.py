"""``lengthwise predict``: train, evaluate and look at predictors of output length."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from lengthwise import predict as p
from lengthwise.backend.collect import Endpoint
from lengthwise.backend.collect import collect as backend_collect
from lengthwise.cli.outputs import require_plotly, require_writable
from lengthwise.cli.tables import print_facts, print_table
from lengthwise.predict import Samples
from lengthwise.predict.evaluation import Evaluation
from lengthwise.predict.evaluation import evaluate as evaluated
from lengthwise.predict.sample_files import read, read_prompts, split
from lengthwise.predict.serialization import NAME, opened
from lengthwise.report.predict import WORDS, predict_json, score_text, write_predict_html
from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError
from lengthwise.schema.files import write_whole

EXAMPLES = """\b
Examples:
  lengthwise predict show default --prompt "Write an essay about rivers."
  lengthwise predict train log.jsonl --out mine.lwp
  lengthwise predict eval mine.lwp other-models.jsonl --report lengths.html
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Train, evaluate and look at predictors of output length.",
    epilog=EXAMPLES,
)

_FILES = typer.Argument(metavar="FILE...", help="JSONL, CSV or Parquet of requests with outputs, or a serving log.")
_MODEL = typer.Option("--model", help="Name of the model where the rows do not tell it.")


@app.command(epilog=EXAMPLES)
def train(
    files: Annotated[list[Path], _FILES],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the predictor goes, usually NAME.lwp.")],
    kind: Annotated[str, typer.Option(help="lexical, encoder, ecdf, buckets or constant.", metavar="KIND")] = "lexical",
    test_share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the prompts that is held out and reported on.")
    ] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split and of the training.")] = 0,
    conformal: Annotated[
        bool, typer.Option("--conformal", help="Move its quantiles to where held-out lengths fall.")
    ] = False,
    model: Annotated[str | None, _MODEL] = None,
) -> None:
    """Train a predictor, report on prompts held out of the training, and write it to a file."""
    train_predictor(files, out, kind=kind, test_share=test_share, seed=seed, conformal=conformal, model=model)


@app.command("eval", epilog=EXAMPLES)
def evaluate(
    predictor: Annotated[str, typer.Argument(metavar="PREDICTOR", help="A file of `predict train`, or default.")],
    files: Annotated[list[Path], _FILES],
    *,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page.")] = None,
    json_: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write all numbers as JSON; - is standard output.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the intervals.")] = 0,
    model: Annotated[str | None, _MODEL] = None,
) -> None:
    """Evaluate a predictor on samples that it has not seen, overall and file by file."""
    evaluate_predictors(predictor, files, report=report, json_file=json_, seed=seed, model=model)


@app.command(epilog=EXAMPLES)
def collect(
    prompts: Annotated[Path, typer.Argument(metavar="FILE", help="Prompts: JSONL, CSV, Parquet, or text, one a line.")],
    *,
    url: Annotated[str, typer.Option(help="An OpenAI-compatible server, such as http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="The model's name there.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSONL that answers are appended to.")],
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Limit of an output.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of the sampling.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
) -> None:
    """Ask a running server for the answers to prompts, to train on; goes on where it was interrupted.

    A key is taken from the environment variable OPENAI_API_KEY, where there is one.
    """
    collect_outputs(
        prompts, url=url, model=model, out=out, max_tokens=max_tokens, temperature=temperature,
        concurrency=concurrency,
    )  # fmt: skip


@app.command(epilog=EXAMPLES)
def show(
    predictor: Annotated[
        str, typer.Argument(metavar="PREDICTOR", help="A file of `predict train`, or default.")
    ] = "default",
    *,
    prompt: Annotated[str | None, typer.Option(help="Show the distribution of this prompt's answer.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Who will answer the prompt.")] = None,
    tokens_so_far: Annotated[int, typer.Option(min=0, help="Tokens that have come already.")] = 0,
) -> None:
    """Show what a predictor is and was trained on, or what it says of a prompt."""
    if prompt is None:
        show_card(predictor)
    else:
        show_prompt(predictor, prompt, model, tokens_so_far)


MIN_COUNT = 100
"""Samples below which scores and intervals say little."""


def notes(samples: Samples) -> list[str]:
    """A line for each thing of the samples that may have been meant otherwise."""
    n, metadata = len(samples), samples.metadata
    ends = ", ".join(f"{reason} ({count:,})" for reason, count in metadata.get("unknown_finish", {}).items())
    keys = ", ".join(f"{key} (did you mean {name}?)" for key, name in metadata.get("misspelt", {}).items())
    told = {
        f"note: {metadata.get('no_prompt', 0):,} of {n:,} rows have no prompt": metadata.get("no_prompt"),
        f"note: keys that are not understood: {keys}": keys,
        f"note: reasons to end that are not known, taken for an end by itself: {ends}": ends,
        f"note: output tokens of {metadata.get('estimated_tokens', 0):,} of {n:,} rows were estimated from the text":
            metadata.get("estimated_tokens"),
        f"note: {metadata.get('left_out', 0):,} rows failed or are empty, and are left out": metadata.get("left_out"),
        f"warning: {n:,} samples are few to learn from; below {MIN_COUNT} take the scores as a hint at best": n < MIN_COUNT,
    }  # fmt: skip
    return [line for line, holds in told.items() if holds]


def seen_lines(found: Evaluation) -> list[str]:
    """One line where the predictor had learnt from prompts that it is judged by."""
    if not found.seen:
        return []
    return [f"warning: not a fair test: {found.seen:,} of these {found.prompts:,} prompts were learnt from"]


def mend_name(source: str) -> str:
    """The name of a predictor as it was given.

    Raises:
        InputError: There is no such file, and the name is near to that of the shipped one.
    """
    path = Path(source)
    if not path.exists() and not path.suffix and source != NAME and difflib.get_close_matches(source.lower(), [NAME]):
        raise InputError(f"there is no predictor file {source}; did you mean: {NAME}?")
    return source


CARD = ("mae", "rmse", "r2", "tau", "tau_within", "accuracy_4", "within_one_4", "coverage90", "width90", "pinball")


def print_scores(found: Sequence[Evaluation], title: str) -> None:
    """Prints a table of scores, a column a predictor, and one by tokens so far."""
    for one in found:
        left = [f"{one.censored:,} outputs ({100 * one.cut_share:.3g} %) were cut"] if one.censored else []
        speed = [", ".join(f"{ms:.3f} ms a prompt at batch {n}" for n, ms in one.latency_ms.items())]
        told = [f"{one.requests:,} requests, {one.prompts:,} prompts", *left, *[s for s in speed if s]]
        print_facts(title if one is found[0] else "", [(one.name, "; ".join(told))])
        for line in seen_lines(one):
            typer.echo(line)
    names = [name for name in CARD if any(name in one.scores for one in found)]
    columns = ("score", *(one.name if len(found) > 1 else "value" for one in found))
    rows = [
        [WORDS[name], *(score_text(name, one.scores[name].value, one.scores[name].half_width) for one in found)]
        for name in names
    ]
    print_table(columns, rows, wraps=())
    windows = found[0].windows
    if len(windows) > 1:
        typer.echo("")
        print_table(
            ("tokens so far", "still running", "MAE", "R2", "tau", "90 % cover", "R2 of all"),
            [
                [f"{w.tokens:,}", f"{w.running:,}", f"{w.mae.value:,.0f}", f"{w.r2.value:.2f}", f"{w.tau.value:.2f}",
                 f"{100 * w.coverage90.value:.0f} %", f"{w.r2_all:.2f}"]
                for w in windows
            ],
        )  # fmt: skip


KINDS: dict[str, Callable[[int], Any]] = {
    "lexical": lambda seed: _made("lexical", "Lexical")(seed=seed),
    "encoder": lambda seed: _made("encoder", "Encoder")(seed=seed),
    "ecdf": lambda _: p.Ecdf(),
    "buckets": lambda _: p.BucketEcdf(),
    "constant": lambda _: p.Constant(),
}
_REPORTED = ("sources", "samples", "prompts", "models", "censored", "trained", "versions", "license", "weaknesses")
_JUDGED = {"held_out": "on held-out prompts", "other_prompts_and_models": "on other prompts and models"}
_BAR = 32


def train_predictor(
    files: Sequence[Path], out: Path, *, kind: str, test_share: float, seed: int, conformal: bool, model: str | None
) -> None:
    """Trains, evaluates on held-out prompts, and saves."""
    if kind not in KINDS:
        raise UnknownNameError("kind of predictor", kind, KINDS)
    require_writable([out], files)
    samples = read(files, model=model)
    for line in notes(samples):
        typer.echo(line)
    predictor = KINDS[kind](seed)
    if conformal:
        predictor = p.Conformal(predictor, seed=seed)
    metadata: dict[str, Any] = {
        **{k: v for k, v in _facts_of(samples).items() if k not in ("unknown_finish", "misspelt")},
        "seed": seed,
        "trained": _today(),
        "versions": _versions(),
    }
    known = samples.prompts.text is not None
    if test_share > 0 and known:
        parts = split(samples, test_share, seed)
        predictor.fit(parts.train)
        found = evaluated(predictor, parts.test, name=f"{kind} on held-out prompts", seed=seed)
        metadata |= {"test_share": test_share, "held_out": _figures(found)}
        print_scores([found], f"{kind}: {len(parts.train):,} samples learnt from, {len(parts.test):,} held out")
    else:
        predictor.fit(samples)
        why = "no prompts, so nothing could be held out" if not known else "nothing was held out"
        typer.echo(f"{kind}: {len(samples):,} samples learnt from; {why}")
    p.save(predictor, out, metadata)
    typer.echo(f"wrote {out} ({out.stat().st_size / 1000:,.0f} kB)")


def evaluate_predictors(
    source: str, files: Sequence[Path], *, report: Path | None, json_file: str | None, seed: int, model: str | None
) -> None:
    """Evaluates on all files together and, where there are several, on each."""
    to_stdout = json_file == "-"
    require_writable([f for f in (report, Path(json_file) if json_file and not to_stdout else None) if f], files)
    if report:
        require_plotly()
    predictor = opened(mend_name(source))
    names = [f.name for f in files] if len({f.name for f in files}) == len(files) else list(map(str, files))
    groups = {name: [file] for name, file in zip(names, files, strict=True)}
    if len(files) > 1:
        groups = {"all": list(files), **groups}
    found = [evaluated(predictor, read(group, model=model), name=name, seed=seed) for name, group in groups.items()]
    if json_file:
        text = predict_json(found, getattr(predictor, "facts_", {}))
        if to_stdout:
            sys.stdout.write(text)
        else:
            write_whole(json_file, text.encode())
    if not to_stdout:
        print_scores(found, f"{source} on {', '.join(map(str, files))}")
    if report:
        write_predict_html(report, found, getattr(predictor, "facts_", {}), heading=f"Predicted lengths: {source}")
        typer.echo(f"wrote {report}", err=to_stdout)


def collect_outputs(
    prompts: Path, *, url: str, model: str, out: Path, max_tokens: int | None, temperature: float | None,
    concurrency: int,
) -> None:  # fmt: skip
    """Asks a server, and tells how it went; InputError where nothing was answered."""
    wanted = read_prompts(prompts)
    endpoint = Endpoint(url, model, max_tokens, temperature, os.environ.get("OPENAI_API_KEY"))
    found = backend_collect(wanted, out, endpoint, concurrency=concurrency)
    typer.echo(f"{found.done:,} answered, {found.skipped:,} were there, {found.failed:,} failed: {out}")
    if found.failed:
        raise InputError(f"{found.failed:,} of {len(wanted):,} prompts were not answered; the first: {found.reason}")


def show_card(source: str) -> None:
    """Prints what a predictor is, what it learnt from, and how well it did."""
    predictor = opened(mend_name(source))
    metadata = dict(getattr(predictor, "facts_", {}) or {})
    figures = {words: metadata.pop(key) for key, words in _JUDGED.items() if metadata.get(key)}
    metadata["versions"] = [f"{name} {number}" for name, number in (metadata.get("versions") or {}).items()]
    known = [key for key in _REPORTED if key in metadata]
    print_facts(
        f"{source}: a predictor of kind {predictor.kind}",
        [
            (key.replace("_", " "), _message(metadata[key]))
            for key in (*known, *sorted(set(metadata) - set(known)))
            if not isinstance(metadata[key], dict)
        ],
    )
    if figures:
        rows = [
            [WORDS[name], *(score_text(name, *of.get(name, (float("nan"),))) for of in figures.values())]
            for name in CARD
            if any(name in of for of in figures.values())
        ]
        print_table(("score", *figures), rows, wraps=())


def show_prompt(source: str, prompt: str, model: str | None, tokens_so_far: int) -> None:
    """Prints the distribution of one prompt's answer."""
    predictor = opened(mend_name(source))
    names = [model] if model is not None else None
    said = predictor.predict(p.Prompts(1, text=[prompt], model=names), np.array([tokens_so_far]))
    so_far = f", given that {tokens_so_far:,} have come" if tokens_so_far else ""
    known = getattr(predictor, "knows_model", None)
    who = [] if model is None else [("model", model + ("" if known is None or known(model) else " (not one it knows)"))]
    print_facts(
        f"Output tokens{so_far}",
        [
            *who,
            ("expected", f"{said.mean[0]:,.0f} tokens"),
            ("half are below", f"{said.median[0]:,.0f} tokens"),
            ("nine in ten are in", f"{said.quantile(0.05)[0]:,.0f} to {said.quantile(0.95)[0]:,.0f} tokens"),
        ],
    )
    print_table(("quantile", "tokens", ""), _bars(said))


def _bars(message: p.LengthDistribution) -> list[list[str]]:
    levels = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
    tokens = [float(message.quantile(level)[0]) for level in levels]
    top = max(tokens)
    return [
        [f"{100 * level:g} %", f"{t:,.0f}", "█" * max(1, round(_BAR * t / top))]
        for level, t in zip(levels, tokens, strict=True)
    ]


def _made(module: str, name: str) -> Any:
    try:
        return getattr(import_module(f"lengthwise.predict.{module}"), name)
    except ImportError as error:
        raise MissingExtraError(f"the {module} predictor", "predict") from error


def _facts_of(samples: p.Samples) -> dict[str, Any]:
    text, model = samples.prompts.text, samples.prompts.model
    return {
        **samples.metadata,
        "samples": len(samples),
        "prompts": len({t.strip() for t in text}) if text is not None else 0,
        "models": sorted({str(m) for m in model}) if model is not None else [],
        "censored": int(samples.censored.sum()),
    }


def _figures(found: Evaluation) -> dict[str, list[float]]:
    return {name: [float(e.value), float(e.half_width)] for name, e in found.scores.items() if np.isfinite(e.value)}


def _message(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    try:
        return ", ".join(str(item) for item in value)
    except TypeError:
        return str(value)


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _versions() -> dict[str, str]:
    found = {}
    for name in ("lengthwise", "numpy", "scikit-learn"):
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found
