"""What an iteration costs and what fits: every source of timing compiles to the same tables."""

from lengthwise.cost.vidur import vidur_tables

__all__ = ["vidur_tables"]
