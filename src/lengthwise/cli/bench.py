"""``lengthwise bench``: a real server under the same load that is simulated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import HtmlReport, JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise bench http://localhost:8000 --workload chat-1m --request-rate 4 --report bench.html
  lengthwise bench http://localhost:8000 --isl 512 --osl 128 --concurrency 16 --num-requests 100
  lengthwise bench http://localhost:8000 examples/chat-70b.toml --records run.parquet
"""


def run(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="An OpenAI-compatible server, such as http://localhost:8000.")
    ],
    scenario: Annotated[
        Path | None,
        typer.Argument(metavar="[SCENARIO]", help="A .toml or .yaml file: workload, limits, and what is behind URL."),
    ] = None,
    *,
    workload: Annotated[
        str | None, typer.Option(metavar="FILE|PRESET", help="A trace, or the name of a preset.")
    ] = None,
    isl: Annotated[int | None, typer.Option(min=1, help="Prompt tokens of every request.")] = None,
    osl: Annotated[int | None, typer.Option(min=1, help="Output tokens of every request.")] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Open loop: requests a second, Poisson; default: the workload's arrivals.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: so many requests at a time.")] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="Default: 1,000, or all of a trace.")] = None,
    variant: Annotated[str | None, typer.Option(help="The scenario's variant whose workload it is.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: workload.cut=redraw; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of requests and prompts; default: the scenario's.")] = None,
    salt: Annotated[
        int | None,
        typer.Option(min=0, help="Of prompts' tokens; default: a new one each run, so that no cache knows them."),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=BOUND", help="A limit for goodput: ttft=2s, tpot=50ms, jct=30s; repeatable."),
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="So many requests before, which nobody counts.")] = 3,
    time_limit: Annotated[
        float | None, typer.Option(help="Stop after so many seconds; keep what there is. Default: none.")
    ] = None,
    stall: Annotated[float, typer.Option(help="A request fails after so many seconds without a byte.")] = 120.0,
    timeout: Annotated[float, typer.Option(help="A request fails after so many seconds in all.")] = 900.0,
    shared_prefix: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each prompt that all have in common.")
    ] = 0.0,
    exact: Annotated[
        bool, typer.Option(help="Ask for outputs of exactly the workload's lengths; otherwise at most so long.")
    ] = True,
    priorities: Annotated[
        bool, typer.Option("--priorities", help="Send the workload's priorities (vLLM: --scheduling-policy priority).")
    ] = False,
    scrape: Annotated[
        bool, typer.Option("--scrape", help="Keep the server's /metrics of every second with the records.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The model's name there; default: the first it lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE.parquet", help="Write requests and what happened to them.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file of --records that is there already.")] = False,
    json: JsonFile = None,
    report: HtmlReport = None,
    quiet: Quiet = False,
) -> None:
    """Put a real server under load: the numbers of simulate, measured, and what the client says of itself.

    What the server can do (token ids as prompts, outputs of exact lengths, numbers of tokens) is found by
    asking it. Latencies count from when a request was due. Ctrl-C keeps what there is. Exit codes: 2 no
    request finished; 3 some did, but failures of the server ended the run early; 130 Ctrl-C. Records keep the
    scenario's deployment, so that compare and calibrate know what was measured whatever name it is served under.
    """
    from lengthwise import measure
    from lengthwise.backend.openai_protocol import Server
    from lengthwise.cli import bench_results, options, outputs, results
    from lengthwise.cli import results as _results
    from lengthwise.schema.errors import InputError
    from lengthwise.usecases import bench

    if time_limit is not None and not time_limit > 0:
        raise InputError(f"--time-limit must be above 0 seconds; it is {time_limit:g}: leave it out for none")
    given = bench_results.settings(isl, osl, request_rate, concurrency, num_requests, slo)
    overrides = [*(set_ or ()), *given]
    bench_results.require_arrivals(scenario, workload, overrides)
    asked = bench.server_scenario(scenario, workload, variant, overrides)
    outputs.require_answers(json, report, asked.files, [] if records is None else [records])
    results.require_new(records, force=force)
    deployment = bench_results.deployment_of(scenario, workload, variant, overrides)
    options.tell(asked.notes, quiet=quiet)
    chosen = asked.run.seed if seed is None else seed
    requests = bench.requests(asked, chosen)
    server = Server(url, model, api_key, stall_s=stall, timeout_s=timeout)
    with bench_results.progress(quiet=quiet) as told:
        measured = measure.bench(
            server,
            requests,
            seed=chosen,
            salt=salt,
            warmup_requests=warmup,
            time_limit_s=math.inf if time_limit is None else time_limit,
            exact=exact,
            shared_prefix=shared_prefix,
            priorities=priorities,
            scrape=scrape,
            deployment=deployment,
            report=told,
        )
    if records is not None:
        measure.write_records(measured, records)
    result = bench_results.result_of(measured, asked)
    if not quiet and json != outputs.STDOUT:
        bench_results.show(result, measured)
    written = _results.write([result], json, report, {}) + ([records] if records is not None else [])
    if not quiet:
        outputs.tell(written)
    bench_results.end(measured, records)
