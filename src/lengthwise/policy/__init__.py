"""Who goes first, who leaves, how a step is formed, which replica: small compiled functions."""
