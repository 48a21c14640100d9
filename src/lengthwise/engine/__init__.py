"""Time passes: a workload on a deployment becomes records."""
