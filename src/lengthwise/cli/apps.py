"""``lengthwise app``: applications of several models, planned and run."""

from __future__ import annotations

import typer

from lengthwise.cli import app_plan, app_profile, app_run, app_status

EXAMPLES = """\b
Example, in the order in which one goes:
  lengthwise app plan examples/apps/ensemble.toml --node 8xA100-80GB@pairs --report plan.html
  lengthwise app profile examples/apps/ensemble.toml --out profile
  lengthwise app run examples/apps/ensemble.toml --out run --profile profile
  lengthwise app status run
"""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Plan and run applications of several models over many rows: soonest, nothing lost, nothing doubled.",
    epilog=EXAMPLES,
)
app.command("plan", epilog=app_plan.EXAMPLES)(app_plan.run)
app.command("profile", epilog=app_profile.EXAMPLES)(app_profile.run)
app.command("run", epilog=app_run.EXAMPLES)(app_run.run)
app.command("status", epilog=app_status.STATUS_EXAMPLES)(app_status.status)
app.command("cancel", epilog=app_status.CANCEL_EXAMPLES)(app_status.cancel)
