"""Our schedulers inside vLLM: ``--scheduler-cls lengthwise.gateway.plugin.LengthScheduler`` or ``...RraScheduler``.

The first serves in order of length, the second in the phases of an RRA schedule. They run in vLLM's own environment,
which needs nothing beside this package (installed without its dependencies, or named by PYTHONPATH). Importing
them imports no vLLM.
"""

from lengthwise.gateway.plugin.length_scheduler import LengthScheduler
from lengthwise.gateway.plugin.rra_scheduler import Phase, Rounds, RraScheduler, Seen
from lengthwise.gateway.plugin.settings import Hint, RraSettings, Settings, hint_of

__all__ = ["Hint", "LengthScheduler", "Phase", "Rounds", "RraScheduler", "RraSettings", "Seen", "Settings", "hint_of"]
