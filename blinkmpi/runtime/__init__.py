"""A communicator at work: its bootstrap, and the life of a call from arguments to result.

``dispatch``       the life of a call: order, cache, number, start, wait, errors
``arguments``      checks mpi4py's arguments of each collective and refuses bad ones; ``buffers`` reads buffer
                   specifications, ``collectives`` has mpi4py's methods
``block_arguments``  the same where blocks differ, whose lengths the ranks tell one another by ``settling``
``context``        what calls run on: machine, plans, GPUs, transport; ``bootstrap`` has the steps that agree on them
``calls_without_program``  MPI's own collectives, barriers, and calls that a rank refuses, so that all ranks do
``cuda``           the same for GPU memory
``ranks``          what has brought the ranks together: MPI, or a key-value store
``requests``       non-blocking and persistent requests, and the progress thread
``inspection``     what a communicator says of itself
``process_exit``   how a process ends, and the job with it
"""
