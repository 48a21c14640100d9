from .app import App
from .auth import Tenants
from .errors import Fault
from .http_server import check_certificate, renew_certificate, server

__all__ = ["App", "Fault", "Tenants", "check_certificate", "renew_certificate", "server"]
