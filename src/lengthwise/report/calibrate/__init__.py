"""Calibrations to people: a page."""

from lengthwise.report.calibrate.html import CalibrationPage, CdfPair, write_calibration_html

__all__ = ["CalibrationPage", "CdfPair", "write_calibration_html"]
