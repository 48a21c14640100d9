from .app import AdminApp as AdminApp
from .state import State as State
