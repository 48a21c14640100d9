"""What ``lengthwise schedule run`` shows while a schedule is kept: a bar, the gateway's log, the admin page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from lengthwise import scenario as scenarios
from lengthwise.cli import _bench_page, _serve_log
from lengthwise.cli._show import console
from lengthwise.scenario import Follow, PlannedRun, Scenario, ScheduleLoad, ScheduleRun
from lengthwise.schema.workload import Workload


def play(
    asked: Scenario,
    engines: Sequence[str],
    planned: PlannedRun,
    workload: Workload,
    load: ScheduleLoad,
    *,
    follow: Follow | None,
    api_key: str | None,
    admin_port: int | None,
    quiet: bool,
) -> ScheduleRun:
    """What came of the run, its progress shown meanwhile.

    Raises:
        InputError: As ``scenario.run_schedule`` does.
    """
    with _log(follow is not None and not quiet), _bench_page.progress(quiet=quiet) as told:
        return scenarios.run_schedule(
            asked, engines, planned, workload, load=replace(load, told=told), follow=follow, api_key=api_key,
            admin_port=admin_port, on_admin=_nothing if quiet else _tell_admin,
        )  # fmt: skip


def end(played: ScheduleRun) -> None:
    """Ends the program as the run ended: an error where no request finished."""
    _bench_page.end(played.measured, None)


def _log(shown: bool) -> AbstractContextManager[None]:
    """The gateway's log on standard error, where it is to be shown."""
    return _serve_log.logging_to_stderr("info", as_json=False, requests=False) if shown else nullcontext()


def _tell_admin(port: int) -> None:
    console().print(f"admin page at http://127.0.0.1:{port}/, metrics at /metrics", style="dim")


def _nothing(_: int) -> None:
    """Says nothing."""


__all__ = ["end", "play"]
