"""Live requests now: length-aware scheduling in front of unmodified engines."""
