from .engine import Ask, Draft, Engine, FailedError, Fault, Launcher
from .local import EngineConfig, EngineTimeouts, LocalLauncher, StaticLauncher
from .simulated import Lengths, SimulatedLauncher, VirtualLoop, run_virtually

__all__ = [
    "Ask",
    "Draft",
    "Engine",
    "EngineConfig",
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
