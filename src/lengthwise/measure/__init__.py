"""Measures real hardware and engines, and calibrates the cost model from what it measured."""

__all__: list[str] = []
