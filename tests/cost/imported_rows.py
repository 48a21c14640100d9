"""How tests of importers look at what was read."""

from __future__ import annotations


def rows(profile, operator, *names, tp=None):
    own = profile.of(operator, tp)
    return [tuple(own[name][i].item() for name in names) for i in range(len(own))]
