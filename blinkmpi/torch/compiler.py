"""``hide``: torch.compile does not look into what compiled code calls here.

Python of ours that compiled code comes to, by way of torch's C++, would be traced otherwise, as the model's own; it is
nothing that could be compiled.
"""

import sys

import torch

DYNAMO = "torch._dynamo"  # importing it takes a second, so it is left to those who use it
_hidden: list[type] = []


def hide(*classes: type) -> None:
    """Hide the methods of these classes, at the first call after torch.compile has come into use; then do nothing."""
    if _hidden or DYNAMO not in sys.modules:
        return
    _hidden.extend(classes)
    for cls in classes:
        for name, method in list(vars(cls).items()):
            if callable(method) and not name.startswith("__"):
                setattr(cls, name, torch.compiler.disable(method))
