"""A communicator at work: its bootstrap, and the life of a call from arguments to result.

``dispatch``       the life of a call: order, cache, number, start, wait, errors
``call_keys``      what a call is found by in the cache
``arguments``      checks mpi4py's arguments of each collective and refuses bad ones; ``buffers`` reads buffer
                   specifications, ``collectives`` has mpi4py's methods
``other_lengths``  calls that differ from earlier ones in lengths alone: C is told of them
``block_arguments``  the same where blocks differ, whose lengths the ranks tell one another by ``settling``
``foreign``        CuPy and torch, if the user has imported them
``grouping``       several calls as few: ``comm.grouped()``
``context``        what calls run on: machine, plans, GPUs, transport; ``bootstrap`` has the steps that agree on them
``outlook``        how calls will be made, as far as that is known before a communicator opens
``children``       what communicators take over that are made from another one, until they open and as they do, and
                   what they leave to the next
``calls_without_program``  MPI's own collectives, barriers, and calls that a rank refuses, so that all ranks do
``delegation``     what MPI must find equal on all ranks in a call that it makes
``entering``       a barrier with a deadline before what has none: Split and its like, ``register``, ``plan``
``cuda``           the same for GPU memory
``guard``          MPI's own methods that take buffers, and what each does with GPU memory
``ranks``          what has brought the ranks together: MPI, or a key-value store
``requests``       non-blocking and persistent requests, and the thread that makes what C cannot begin
``inspection``     what a communicator says of itself
``process_exit``   how a process ends, and the job with it
"""
