"""What every room uses.

``codec``         JSON for the value types, with exact fractions
``settings``      the ``BLINKMPI_`` variables
``together``      failing together: an error on one rank is an error on all
``lazy``          names that a package offers, loaded from their modules when they are asked for
``launcher``      what MPI's launcher tells a process
``cache_folder``  the user's cache folder; ``lru`` a cache in memory
``text``          ranks, counts and sizes in messages; ``progress`` a bar on a terminal
"""
