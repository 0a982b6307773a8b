"""How bytes move: executors of programs (Blink section 4, CodeGen).

``interface``      what every transport gives the runtime: a bound call with ``start``, ``test``, ``wait`` and ``run``
``announcement``   what a rank announces as it enters a call, and which all ranks compare
``control_pages``  the shared memory that holds announcements, flags, heartbeats and the abort word
``liveness``       what a rank knows of its peers, and the errors that follow from it
``host/``          executes programs on CPU ranks, in shared memory, in C or NumPy
``network/``       carries channels between nodes, as MPI messages
``cuda/``          executes programs on GPUs, one kernel for each rank and call

A transport sees programs, never plans or trees. ``host`` may use ``network``; ``host`` and ``cuda`` do not know each
other.
"""
