"""How bytes move: executors of programs (Blink section 4, CodeGen).

``interface``      what every transport gives the runtime: a bound call with ``start``, ``test``, ``wait`` and ``run``
``announcement``   what a rank announces as it enters a call, and which all ranks compare
``control_pages``  the shared memory that holds announcements, flags, heartbeats and the abort word
``liveness``       what a rank knows of its peers, and the errors that follow from it
``slow_waits``     when to warn of a wait; ``processes`` who the ranks are, ``python_stacks`` asks them what they do
``recorder``       what a rank's calls are counted and recorded in: ``counters``, in shared memory, and ``events``
``stats``          the counters in words; ``tracing`` writes the events as a trace
``host/``          executes programs on CPU ranks, in shared memory, in C or NumPy
``network/``       carries channels between nodes, as MPI messages
``cuda/``          executes programs on GPUs, one kernel for each rank and call

A transport sees programs, never plans or trees. ``host`` and ``cuda`` send to other nodes through ``network``, and
neither imports the other; but C that makes calls again (``host/launches.h``) launches kernels, too, and reads arrays of
CuPy and torch (``host/device_arrays.h``).
"""
