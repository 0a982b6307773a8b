"""Packings of a fixed pattern.

``stars``          method ``onehop``: every rank sends to every other directly
``chains``         method ``chain``: depth-first path trees
``rings``          method ``rings``: what NCCL builds
``shared_memory``  ``direct`` and ``chain`` for CPU ranks that share one memory
"""
