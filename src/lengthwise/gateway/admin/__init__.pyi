from .access import Access as Access
from .api import AdminApi as AdminApi
from .app import AdminApp as AdminApp
from .state import State as State
