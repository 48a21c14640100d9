"""A planner in the browser, served from this machine: pages that simulate, search and compare, and a JSON API."""
