"""Packings of a fixed pattern, and such as put others side by side.

``stars``          method ``onehop``: every rank sends to every other directly
``chains``         method ``chain``: depth-first path trees
``shallow``        method ``shallow``: trees of at most so many hops
``soonest``        the one tree of that method for large machines: its messages arrive soonest
``hybrid``         method ``hybrid``: two kinds of links at once
``shared_memory``  ``direct`` and ``chain`` for CPU ranks that share one memory
"""
