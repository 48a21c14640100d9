"""The gateway: length-aware scheduling of live requests in front of unmodified engines."""
