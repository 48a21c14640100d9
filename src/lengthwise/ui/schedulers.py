"""The Schedulers page: orders of a queue and kinds of batches on the same requests, and a minute of it to play."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog, workload
from lengthwise.config.scenario import loads
from lengthwise.lab import MIN_GAIN, MIN_WAITING_SHARE, ratio
from lengthwise.report.formatting import PLUS_MINUS, signed
from lengthwise.report.summary_table import rows
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import RequestRecords
from lengthwise.ui.page import (
    Outcome,
    Page,
    Values,
    fields_of,
    require_model,
    require_name,
    require_number,
    require_workload,
)
from lengthwise.ui.work import Task
from lengthwise.usecases import simulate
from lengthwise.usecases.short_options import toml_value
from lengthwise.usecases.simulate import VariantOutcome

SCHEDULERS: dict[str, tuple[str, dict[str, str]]] = {
    "FCFS": ("first come, first served, with continuous batching (vLLM v1)", {"policy": "vllm_v1"}),
    "SJF": ("shortest predicted output first", {"policy": "sjf"}),
    "SRTF": ("shortest remaining predicted output first, with preemption", {"policy": "srtf"}),
    "ISRTF": ("SRTF that preempts only where the predicted gain is far above the cost", {"policy": "isrtf"}),
    "ELIS": ("SRTF in windows of 50 tokens", {"policy": "elis"}),
    "Gittins": ("smallest Gittins rank of the predicted distribution first", {"policy": "gittins"}),
    "Multi-Bin": ("batches of similar predicted length that run to their end", {"policy": "multi_bin"}),
    "Multi-Bin, continuous": ("bins order the queue of continuous batching", {"policy": "multi_bin_continuous"}),
    "RRA": ("ExeGPT: prefill phases of B_E requests, then N_D decode iterations", {}),
    "static": ("batches that run until all their requests have finished", {"policy": "faster_transformer"}),
}
"""By name: what it does, and its settings of [scheduler]."""
DEFAULTS: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "A100-80GB",
    "tp": 1,
    "replicas": 1,
    "workload": "chat-1m",
    "rate": 15.0,  # near saturation, where a queue exists: 5.0 s of queueing in the mean under FCFS
    "max_num_seqs": 256,
    "schedulers": ["FCFS", "SJF", "ISRTF", "Multi-Bin, continuous"],
    "sigma": 0.6,
    "bins": 4,
    "prefill_batch": 4,
    "decode_steps": 16,
    "num_requests": 2000,
    "seeds": 5,
}
CARDS = ("jct_s.mean", "jct_s.p50", "jct_s.p99", "ttft_s.p50", "ttft_s.p90", "queueing_delay_s.mean", "rates.requests")
MINUTE_S, MAX_SHOWN = 60.0, 2000  # of the animation; requests of each scheduler in it
LEVEL = 0.95


def choices() -> dict[str, Any]:
    """Return the names that the page's lists offer, and the defaults of its fields."""
    return {
        "models": sorted(catalog.models()),
        "gpus": sorted(catalog.gpus()),
        "workloads": list(workload.presets()),
        "schedulers": {name: about for name, (about, _) in SCHEDULERS.items()},
        "defaults": DEFAULTS,
    }


def scenario_text(fields: Values) -> str:
    """Return the scenario file whose variants are the chosen schedulers."""
    own = {
        "Multi-Bin": {"binning": f"equal_mass(k={fields['bins']})"},
        "Multi-Bin, continuous": {"binning": f"equal_mass(k={fields['bins']})"},
        "RRA": {"batching": f"rra(prefill_batch={fields['prefill_batch']}, decode_steps={fields['decode_steps']})"},
    }
    prompt, _, output = fields["workload"].partition("/")
    lengths = f"prompt = {prompt}\noutput = {output}" if output else f"preset = {json.dumps(prompt)}"
    exact = 'kind = "oracle"' if not fields["sigma"] else f'kind = "lognormal_error"\nsigma = {fields["sigma"]:g}'
    variants = []
    for name in fields["schedulers"]:
        settings = SCHEDULERS[name][1] | own.get(name, {})
        lines = [f"scheduler.{key} = {toml_value(value)}" for key, value in settings.items()]
        variants.append("\n".join(["[[variants]]", f"name = {json.dumps(name)}", *lines]))
    return "\n\n".join(
        [
            f"[workload]\n{lengths}\nrequest_rate = {fields['rate']:.15g}\nnum_requests = {fields['num_requests']}",
            f"[predictor]\n{exact}",
            f"[deployment]\nmodel = {json.dumps(fields['model'])}\ngpu = {json.dumps(fields['gpu'])}",
            f"tp = {fields['tp']}\nreplicas = {fields['replicas']}",
            f"[engine]\nmax_num_seqs = {fields['max_num_seqs']}",
            f"[run]\nseeds = {fields['seeds']}\nmodel_draws = 0",
            *variants,
        ]
    )


def run(values: Values, task: Task) -> Outcome:
    """Simulate the chosen schedulers. Raises InputError for unknown fields and names and for wrong values."""
    fields = _checked(values)
    text = scenario_text(fields)
    scenario = loads(text, source="the page")
    outcomes = simulate.run(scenario, jobs=1, progress=lambda done, of: task.report("simulations", done, of))
    table = {row.metric.key: row for row in rows([simulate.result_of(one) for one in outcomes])}
    arrival_s = outcomes[0].records.requests.arrival_s
    start_s, minute_s, shown = _minute([one.records.requests for one in outcomes])
    requests = outcomes[0].records.requests
    answer = {
        "schedulers": [
            {
                "name": one.variant.name,
                "about": SCHEDULERS[one.variant.name][0],
                "values": [_cell(table[key].cells[at]) for key in CARDS if key in table],
                "against_first": {name: _change(outcomes[0], one, name) for name in ("mean", "p99")},
                "preemptions": int(one.records.requests.preemptions.sum()),
                "events_s": [
                    _seconds(column[shown] - start_s)
                    for column in (
                        one.records.requests.scheduled_s,
                        one.records.requests.first_token_s,
                        one.records.requests.finished_s,
                    )
                ],
                "notes": list(one.notes),
            }
            for at, one in enumerate(outcomes)
        ],
        "verdict": verdict(outcomes),
        "metrics": [f"{table[key].metric.label}, {table[key].unit}" for key in CARDS if key in table],
        "arrival_s": _seconds(arrival_s[shown] - start_s),
        "output_tokens": requests.output_tokens[shown].tolist(),
        "slots": fields["max_num_seqs"] * fields["replicas"],
        "minute_s": minute_s,
        "command": "lengthwise simulate scenario.toml",
        "scenario": text,
    }
    return Outcome(answer)


def _minute(runs: Sequence[RequestRecords]) -> tuple[float, float, npt.NDArray[np.int64]]:
    """Return start, seconds and requests of the minute to play: all that are in the system in one of the runs.

    The minute is shorter, or begins with the run, if they are more than MAX_SHOWN.
    """
    arrival_s = runs[0].arrival_s
    last_s = float(np.nanmax(arrival_s))
    finished_s = np.max([np.where(np.isfinite(one.finished_s), one.finished_s, np.inf) for one in runs], axis=0)
    for start_s in (float(max(0.0, min(last_s / 3, last_s - MINUTE_S))), 0.0):
        shown = np.flatnonzero((finished_s > start_s) & (arrival_s < start_s + MINUTE_S))
        end_s = min(start_s + MINUTE_S, last_s)
        if len(shown) > MAX_SHOWN:
            end_s = min(end_s, float(np.sort(arrival_s[shown])[MAX_SHOWN]))
        if end_s > start_s:
            break
    return start_s, end_s - start_s, shown[arrival_s[shown] <= end_s][:MAX_SHOWN]


def verdict(outcomes: Sequence[VariantOutcome]) -> str:
    """Return whether one of the schedulers is worth it against the first, by the rule of ``lengthwise lab``.

    It must reduce the mean JCT significantly (Bonferroni, over all schedulers tried) and by at least 1 %, and cost the
    99th percentile no more than the mean gains.
    """
    first, *others = outcomes
    if not others:
        return ""
    name, level = first.variant.name, 1 - (1 - LEVEL) / len(others)
    faster: list[
        tuple[float, float, str]
    ] = []  # the gain in the mean, the loss in the 99th percentile, and both as text
    for one in others:
        mean, p99 = (_change(first, one, key, level) for key in ("mean", "p99"))
        gain, half, loss = mean["percent"], mean["half_width"], p99["percent"]
        if None not in (gain, half, loss) and gain <= -100 * MIN_GAIN and gain + half < 0:
            text = f"changes the mean JCT of {name} by {mean['text']} and its 99th percentile by {p99['text']}"
            faster.append((-gain, loss, f"{one.variant.name} {text}"))
    if accepted := [one for one in faster if one[1] <= one[0]]:
        return f"Worth it: {max(accepted)[2]}."
    if faster:
        text = max(faster, key=lambda one: one[0] - one[1])[2]
        return f"Not worth it: {text}, so that the tail loses more than the mean gains."
    share = first.summary.queueing_delay_s.mean.value / first.summary.jct_s.mean.value
    if share < MIN_WAITING_SHARE:
        waits = f"waiting is {100 * share:.1f} % of the mean JCT of {name}"
        return f"Not worth it: hardly any request waits ({waits}), so that no order of the queue can help."
    return (
        f"Not worth it: no scheduler has a mean JCT that is significantly, and by at least 1 %, below that of {name}."
    )


def _change(first: VariantOutcome, other: VariantOutcome, name: str, level: float = LEVEL) -> dict[str, Any]:
    """Return the change of a JCT in percent on the same seeds, in which the noise of both cancels, and its interval."""
    values = [[getattr(summary.jct_s, name).value for summary in one.summaries] for one in (other, first)]
    found = ratio(values[0], values[1], level)
    if not np.isfinite(found.value):
        return {"text": "unknown", "percent": None, "half_width": None}
    half = 100 * found.half_width if found.has_interval else None
    text = f"{signed(100 * (found.value - 1))}{'' if half is None else f' {PLUS_MINUS} {half:.1f}'} %"
    return {"text": text, "percent": 100 * (found.value - 1), "half_width": half}


def _cell(cell: Any) -> dict[str, str]:
    return {"value": cell.text, "interval": cell.interval}


def _seconds(column: Any) -> list[float | None]:
    return [round(value, 3) if np.isfinite(value) else None for value in column.tolist()]


def _checked(values: Values) -> Values:
    fields = fields_of(values, DEFAULTS)
    require_model(fields["model"])
    require_name("GPU", fields["gpu"], catalog.gpus())
    require_workload(fields["workload"])
    names: Sequence[Any] = fields["schedulers"]
    if not isinstance(names, list) or not 0 < len(names) <= len(SCHEDULERS) or len(set(map(str, names))) < len(names):
        raise InputError(f"schedulers must be at least one, and none twice; it is {names!r}")
    for name in names:
        require_name("scheduler", name, SCHEDULERS)
    require_number("rate", fields["rate"])
    if fields["sigma"] != 0:
        require_number("sigma", fields["sigma"], 10)
    counts = {
        "tp": 64,
        "replicas": 64,
        "max_num_seqs": 4096,
        "bins": 64,
        "prefill_batch": 4096,
        "decode_steps": 4096,
        "num_requests": 20_000,
    }
    for name, most in {**counts, "seeds": 50}.items():
        fields[name] = int(require_number(name, fields[name], most))
    return fields


PAGE = Page("schedulers", "Schedulers", choices, jobs={"run": run})
