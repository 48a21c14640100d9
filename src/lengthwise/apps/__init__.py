"""Offline applications that call several models. They run on engines by a plan of stages, and all outputs are stored.

Example:
    short = Sampling(max_tokens=128)
    models = [Model("writer", "llama-3-8b"), Model("judge", "llama-3.1-70b")]
    calls = [
        Call("draft", "writer", "Write a line about {{ topic }}.", sampling=short),
        Call("verdict", "judge", "Is this good? {{ draft }}", sampling=short),
    ]
    app = App(models, calls)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
