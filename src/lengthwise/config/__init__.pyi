from .gateway import GatewaySettings, gateway_reader, load_gateway, loads_gateway
from .scenario import Scenario, load, loads
from .values import seconds
from .variants import BINNING_RULES, Variant, build, deployment, scheduler

__all__ = ["BINNING_RULES", "GatewaySettings", "Scenario", "Variant", "build", "deployment", "gateway_reader", "load", "load_gateway", "loads", "loads_gateway", "scheduler", "seconds"]
