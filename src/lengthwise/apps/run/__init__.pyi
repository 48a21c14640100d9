from .coordinator import CANCEL, RESUME, Coordinator, run_here, run_simulated
from .dispatch import Reused
from .job import (
    ClusterRooms,
    Decider,
    Drawn,
    Drifted,
    GivenRooms,
    Guide,
    Job,
    Layout,
    Outputs,
    Planned,
    RequestSpec,
    Rooms,
    Settings,
    Work,
    alive,
    expected_tokens,
    given_guide,
    guide_of,
    identity_of,
    job_of,
    lay,
    new_owner,
)
from .progress import Ended, EnginesFailedError, Event, ModelProgress, ModelStatus, Progress, status_of
from .results import Exported, RunFolder, export, manifest, recorded, write_manifest

__all__ = ["CANCEL", "RESUME", "ClusterRooms", "Coordinator", "Decider", "Drawn", "Drifted", "Ended", "EnginesFailedError", "Event", "Exported", "GivenRooms", "Guide", "Job", "Layout", "ModelProgress", "ModelStatus", "Outputs", "Planned", "Progress", "RequestSpec", "Reused", "Rooms", "RunFolder", "Settings", "Work", "alive", "expected_tokens", "export", "given_guide", "guide_of", "identity_of", "job_of", "lay", "manifest", "new_owner", "recorded", "run_here", "run_simulated", "status_of", "write_manifest"]
