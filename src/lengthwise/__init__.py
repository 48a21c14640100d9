"""lengthwise: plan, simulate and schedule LLM inference by output length.

from lengthwise import Poisson, deploy, preset, simulate, summarize

deployment = deploy("llama-2-70b", "A100-80GB", tp=4)
workload = preset("chat-1m").generate(2_000, Poisson(4.0), seed=0)
summary = summarize(simulate(workload, deployment), deployment)
print(summary.ttft_s.p99)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lengthwise.engine.deployment_builder import deploy
    from lengthwise.engine.simulation import simulate
    from lengthwise.metrics import Slo, Summary, frame
    from lengthwise.metrics.pooling import combine
    from lengthwise.metrics.summary import summarize
    from lengthwise.report import Result, write_html
    from lengthwise.report.summary_table import table
    from lengthwise.schema.deployment import Deployment, EngineLimits, Scheduler
    from lengthwise.schema.errors import InputError, LengthwiseError
    from lengthwise.schema.records import Records, Status
    from lengthwise.schema.workload import Workload
    from lengthwise.workload import ClosedLoop, Gamma, Poisson, describe, generate, preset, read, write

_HOMES = {
    "ClosedLoop": "workload",
    "Deployment": "schema.deployment",
    "EngineLimits": "schema.deployment",
    "Gamma": "workload",
    "InputError": "schema.errors",
    "LengthwiseError": "schema.errors",
    "Poisson": "workload",
    "Records": "schema.records",
    "Result": "report",
    "Scheduler": "schema.deployment",
    "Slo": "metrics",
    "Status": "schema.records",
    "Summary": "metrics",
    "Workload": "schema.workload",
    "combine": "metrics",
    "deploy": "engine",
    "describe": "workload",
    "frame": "metrics",
    "generate": "workload",
    "preset": "workload",
    "read": "workload",
    "simulate": "engine",
    "summarize": "metrics",
    "table": "report",
    "write": "workload",
    "write_html": "report",
}

__all__ = [
    "ClosedLoop",
    "Deployment",
    "EngineLimits",
    "Gamma",
    "InputError",
    "LengthwiseError",
    "Poisson",
    "Records",
    "Result",
    "Scheduler",
    "Slo",
    "Status",
    "Summary",
    "Workload",
    "combine",
    "deploy",
    "describe",
    "frame",
    "generate",
    "preset",
    "read",
    "simulate",
    "summarize",
    "table",
    "write",
    "write_html",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first access."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lengthwise")
    if name not in _HOMES:
        raise AttributeError(f"module 'lengthwise' has no attribute {name!r}")
    return getattr(import_module(f"lengthwise.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
