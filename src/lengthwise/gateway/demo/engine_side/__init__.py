"""What runs inside an engine's environment, not in ours: nothing here is imported by the gateway."""

__all__: list[str] = []
