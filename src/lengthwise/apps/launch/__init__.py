"""How engines come to be there: processes of this machine, Ray actors, given addresses, or simulated ones."""

from lengthwise.apps.launch.commands import Loaded
from lengthwise.apps.launch.contracts import Ask, Draft, Engine, FailedError, Fault, Launcher
from lengthwise.apps.launch.local import LocalLauncher, Patience
from lengthwise.apps.launch.simulated import Lengths, SimulatedLauncher
from lengthwise.apps.launch.static import StaticLauncher
from lengthwise.apps.launch.virtual import VirtualLoop, run_virtually

__all__ = [
    "Ask",
    "Draft",
    "Engine",
    "FailedError",
    "Fault",
    "Launcher",
    "Lengths",
    "Loaded",
    "LocalLauncher",
    "Patience",
    "SimulatedLauncher",
    "StaticLauncher",
    "VirtualLoop",
    "run_virtually",
]
