from .engine import Ask, Draft, Engine, FailedError, Fault, Launcher
from .local import EngineSpec, EngineTimeouts, LocalLauncher, StaticLauncher
from .simulated import Lengths, SimulatedLauncher, VirtualLoop, run_virtually

__all__ = [
    "Ask",
    "Draft",
    "Engine",
    "EngineSpec",
    "EngineTimeouts",
    "FailedError",
    "Fault",
    "Launcher",
    "Lengths",
    "LocalLauncher",
    "SimulatedLauncher",
    "StaticLauncher",
    "VirtualLoop",
    "run_virtually",
]
