"""Applications of several models: planned in stages, run on engines, every answer kept.

from lengthwise.apps import App, Call, Model, Sampling

short = Sampling(max_tokens=128)
models = [Model("writer", "llama-3-8b"), Model("judge", "llama-3.1-70b")]
calls = [
    Call("draft", "writer", "Write a line about {{ topic }}.", sampling=short),
    Call("verdict", "judge", "Is this good? {{ draft }}", sampling=short),
]
app = App(models, calls)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lengthwise.apps.app import App, Call, Fan, From, Loop, Model, Report, Sampling, each, over, times
    from lengthwise.apps.inputs import Rows, read_rows

_HOMES = {
    "App": "app",
    "Call": "app",
    "Fan": "app",
    "From": "app",
    "Loop": "app",
    "Model": "app",
    "Rows": "inputs",
    "Sampling": "app",
    "Report": "app",
    "each": "app",
    "over": "app",
    "read_rows": "inputs",
    "times": "app",
}

__all__ = [
    "App",
    "Call",
    "Fan",
    "From",
    "Loop",
    "Model",
    "Report",
    "Rows",
    "Sampling",
    "each",
    "over",
    "read_rows",
    "times",
]


def __getattr__(name: str) -> Any:
    """A name of the door, its module opened only now."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lengthwise.apps' has no attribute {name!r}")
    return getattr(import_module(f"lengthwise.apps.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
