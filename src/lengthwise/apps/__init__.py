"""Applications of several models: planned in stages, run on engines, every answer kept."""
