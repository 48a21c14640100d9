"""How long an answer will be: a predictor in line or in a process, set right by what finishes here."""

from lengthwise.gateway.forecast._belief import Belief
from lengthwise.gateway.forecast._process import Care
from lengthwise.gateway.forecast._told import told_tokens
from lengthwise.gateway.forecast.forecaster import Forecaster
from lengthwise.gateway.forecast.oracle import Oracle

__all__ = ["Belief", "Care", "Forecaster", "Oracle", "told_tokens"]
