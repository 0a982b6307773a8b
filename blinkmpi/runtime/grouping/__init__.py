"""Several calls as few: what is called within ``comm.grouped()``, and calls of lists of buffers.

``group.py`` notes the calls of a group, ``launches.py`` makes of them calls of one vector each, and ``buckets.py`` says
where the parts of the users' buffers lie in it.
"""
