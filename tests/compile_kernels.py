"""Compile what most tests run, or find it compiled: simulations, also by engines' own rules, and schedules."""

import numpy as np

from lengthwise import Workload, deploy, engine, simulate
from lengthwise.schedule.stage_costs import compiled

if __name__ == "__main__":
    engine.warm_up()
    one = np.ones(1, np.int64)
    for scheduler in ("sglang", "trtllm"):
        simulate(Workload(np.zeros(1), one, one, max_tokens=one), deploy("opt-125m", "A100-80GB", scheduler=scheduler))
    compiled("rra_rows")
