"""Profiles of operators: our file format, and readers of other people's measurements."""

__all__: list[str] = []
