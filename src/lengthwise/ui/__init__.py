"""A planner in the browser, served from this machine: every move of a slider simulates the deployment again."""
