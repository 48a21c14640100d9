"""Our schedulers inside vLLM: ``--scheduler-cls lengthwise.gateway.plugin.LengthScheduler`` or ``...RraScheduler``.

The first serves in order of length, the second in the phases of an RRA schedule. They run in vLLM's own environment,
which needs nothing beside this package (installed without its dependencies, or named by PYTHONPATH). Importing
them imports no vLLM.
"""

from lengthwise.gateway.plugin.hint import Hint, hint_of
from lengthwise.gateway.plugin.rounds import Phase, Rounds, Seen
from lengthwise.gateway.plugin.rra_scheduler import RraScheduler
from lengthwise.gateway.plugin.rra_settings import RraSettings
from lengthwise.gateway.plugin.scheduler import LengthScheduler
from lengthwise.gateway.plugin.settings import Settings

__all__ = [
    "Hint",
    "LengthScheduler",
    "Phase",
    "Rounds",
    "RraScheduler",
    "RraSettings",
    "Seen",
    "Settings",
    "hint_of",
]
