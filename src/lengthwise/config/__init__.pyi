from .gateway import GatewaySettings as GatewaySettings
from .gateway import gateway_reader as gateway_reader
from .gateway import load_gateway as load_gateway
from .gateway import loads_gateway as loads_gateway
from .scenario import Scenario as Scenario
from .scenario import load as load
from .scenario import loads as loads
from .values import seconds as seconds
