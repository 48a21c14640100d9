"""Which deployment: the cheapest that keeps the promises."""
