"""Lengths: Multi-Bin Batching's theory and gains, predictors, schedulers that use predictions.

Sections that need recorded data look for it in ``shared`` next to the checkout (LENGTHWISE_SHARED, --shared), or skip.
"""

from _sections import Sections

SECTIONS = Sections("lengths", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
