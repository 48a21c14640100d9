from .engine import Ask, Draft, Engine, FailedError, Fault, Launcher
from .local import Loaded, LocalLauncher, Patience, StaticLauncher
from .simulated import Lengths, SimulatedLauncher, VirtualLoop, run_virtually

__all__ = ["Ask", "Draft", "Engine", "FailedError", "Fault", "Launcher", "Lengths", "Loaded", "LocalLauncher", "Patience", "SimulatedLauncher", "StaticLauncher", "VirtualLoop", "run_virtually"]
