"""The gateway: its cost and that of its peers, its scaling, the time of a reorder, the gain of its order."""

from _sections import Sections

SECTIONS = Sections("gateway", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
