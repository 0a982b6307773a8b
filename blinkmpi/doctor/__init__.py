"""``blinkmpi doctor``: would a job run well here, and if not, what to do?

``examination`` collects the facts of each rank, ``diagnosis`` judges them, ``gpu_checks`` those about GPUs; ``report``
has the values.
"""
