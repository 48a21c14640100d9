from .gateway import GatewaySettings, gateway_reader, load_gateway, loads_gateway
from .scenario import Scenario, load, loads
from .values import seconds

__all__ = ["GatewaySettings", "Scenario", "gateway_reader", "load", "load_gateway", "loads", "loads_gateway", "seconds"]
