"""Scores of predictors to people: a page, and a file for machines."""

from lengthwise.report.predict._words import WORDS, score_text
from lengthwise.report.predict.html import write_predict_html
from lengthwise.report.predict.json_file import predict_json

__all__ = ["WORDS", "predict_json", "score_text", "write_predict_html"]
