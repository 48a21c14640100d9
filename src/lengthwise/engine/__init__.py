"""Time passes: a workload on a deployment becomes records."""

from lengthwise.engine.simulate import ready, simulate

__all__ = ["ready", "simulate"]
