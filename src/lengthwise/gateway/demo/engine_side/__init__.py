"""Scripts that run in an engine's environment. The gateway does not import them."""
