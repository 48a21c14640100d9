"""Applications run: tasks leased, asked and recorded; the plan followed; every answer kept."""

from lengthwise.apps.run.assembling import Planned, Work, expected_tokens, given_guide, guide_of, job_of
from lengthwise.apps.run.contracts import Asked, Decider, Drifted, Guide, Job, Outputs, Rooms, Settings
from lengthwise.apps.run.coordinator import CANCEL, Coordinator
from lengthwise.apps.run.drawn import Drawn
from lengthwise.apps.run.ending import Ended, EnginesFailedError
from lengthwise.apps.run.exporting import Exported, export, write_manifest
from lengthwise.apps.run.folder import RunFolder
from lengthwise.apps.run.layout import Layout, identity_of, lay
from lengthwise.apps.run.manifest import manifest
from lengthwise.apps.run.owners import alive, new_owner
from lengthwise.apps.run.progress import Event, ModelProgress, Progress
from lengthwise.apps.run.recorded import recorded
from lengthwise.apps.run.reuse import Reused
from lengthwise.apps.run.rooms import ClusterRooms, GivenRooms
from lengthwise.apps.run.simulation import run_simulated
from lengthwise.apps.run.status import ModelStatus, status_of
from lengthwise.apps.run.stopping import RESUME, run_here

__all__ = [
    "CANCEL",
    "RESUME",
    "Asked",
    "ClusterRooms",
    "Coordinator",
    "Decider",
    "Drawn",
    "Drifted",
    "Ended",
    "EnginesFailedError",
    "Event",
    "Exported",
    "GivenRooms",
    "Guide",
    "Job",
    "Layout",
    "ModelProgress",
    "ModelStatus",
    "Outputs",
    "Planned",
    "Progress",
    "Reused",
    "Rooms",
    "RunFolder",
    "Settings",
    "Work",
    "alive",
    "expected_tokens",
    "export",
    "given_guide",
    "guide_of",
    "identity_of",
    "job_of",
    "lay",
    "manifest",
    "new_owner",
    "recorded",
    "run_here",
    "run_simulated",
    "status_of",
    "write_manifest",
]
