"""Predictors of output lengths: from a prompt and the tokens so far to a distribution of the output length."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
