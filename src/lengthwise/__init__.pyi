from .engine import deploy as deploy
from .engine import simulate as simulate
from .metrics import Slo as Slo
from .metrics import Summary as Summary
from .metrics import combine as combine
from .metrics import frame as frame
from .metrics import summarize as summarize
from .report import Result as Result
from .report import table as table
from .report import write_html as write_html
from .schema.deployment import Deployment as Deployment
from .schema.deployment import EngineLimits as EngineLimits
from .schema.deployment import Scheduler as Scheduler
from .schema.errors import InputError as InputError
from .schema.errors import LengthwiseError as LengthwiseError
from .schema.records import Records as Records
from .schema.records import Status as Status
from .schema.workload import Workload as Workload
from .workload import ClosedLoop as ClosedLoop
from .workload import Gamma as Gamma
from .workload import Poisson as Poisson
from .workload import describe as describe
from .workload import generate as generate
from .workload import preset as preset
from .workload import read as read
from .workload import write as write

__version__: str
