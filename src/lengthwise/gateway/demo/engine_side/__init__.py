"""Scripts that run in an engine's environment; the gateway does not import them."""
