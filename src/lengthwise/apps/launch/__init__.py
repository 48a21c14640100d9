"""How engines come to be there: processes of this machine, Ray actors, given addresses, or simulated ones."""
