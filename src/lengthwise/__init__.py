"""lengthwise: plan, simulate and schedule LLM inference by output length.

from lengthwise import Poisson, deploy, preset, simulate, summarize

deployment = deploy("llama-2-70b", "A100-80GB", tp=4)
workload = preset("chat-1m").generate(2_000, Poisson(4.0), seed=0)
summary = summarize(simulate(workload, deployment), deployment)
print(summary.ttft_s.p99)
"""

from typing import Any

import lazy_loader

_getattr, _dir, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lengthwise")
    return _getattr(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
