from .engine_request import resume_conflict
from .relay import Answer, Relay
from .upstream import open_session, read_bounded

__all__ = ["Answer", "Relay", "open_session", "read_bounded", "resume_conflict"]
