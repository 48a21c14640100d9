"""Tenants: keys, quotas and usage in a store that several gateways may share, and the API that changes them."""
