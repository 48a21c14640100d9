from .engine_request import resume_conflict as resume_conflict
from .relay import Answer as Answer
from .relay import Relay as Relay
from .relay import RelayedRequest as RelayedRequest
from .upstream import open_session as open_session
from .upstream import read_bounded as read_bounded
