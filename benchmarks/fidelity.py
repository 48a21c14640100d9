"""Fidelity: predictions against measurements, for every ground truth that this machine allows.

``live`` starts real engines (make engine torch); ``recorded``, ``calibrated`` and ``argonne`` read the folder
``shared``; ``coverage`` and ``counters`` calibrate to planted runs; ``times`` measures calibrations, ``profiles`` this
machine's operators. --save archives replaced campaigns; --take ROWS.JSON takes rows measured by _live.py --out.
"""

from _harness import making
from _sections import Sections

CAMPAIGNS = ("fidelity.live", "fidelity.gpu.")
SECTIONS = Sections("fidelity", __doc__, CAMPAIGNS, making)

if __name__ == "__main__":
    SECTIONS.main()
