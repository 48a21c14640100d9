from .app import App as App
from .asgi import Exchange as Exchange
from .auth import Tenants as Tenants
from .errors import Fault as Fault
from .http_server import server as server
