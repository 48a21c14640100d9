from .ledgers import LEDGER_CHECKS as LEDGER_CHECKS
from .ledgers import check_ledger as check_ledger
from .policies import POLICY_CHECKS as POLICY_CHECKS
from .policies import check_policy as check_policy
from .predictors import PREDICTOR_CHECKS as PREDICTOR_CHECKS
from .predictors import check_predictor as check_predictor
from .predictors import toy_samples as toy_samples
