"""A communicator at work: its bootstrap, and the life of a call from arguments to result.

``dispatch``       the calls of a communicator, from its opening to its end; on these steps:
``grouping``       several calls as few: ``comm.grouped()``
``making``         a blocking call is found, or bound, and run; ``call_keys`` has what it is found by
``binding``        arguments become a call that can be started
``agreeing``       what ranks tell one another before that: lengths, and that a plan has to be made
``sequence``       the number of a call, the order of all, and what ends them
``entering``       a barrier with a deadline before what has none: Split and its like, ``register``, ``plan``
``arguments``      checks mpi4py's arguments of each collective and refuses bad ones; ``buffers`` reads buffer
                   specifications, ``collectives`` has mpi4py's methods
``other_lengths``  calls that differ from earlier ones in lengths alone: C is told of them
``block_arguments``  the same where blocks differ, whose lengths the ranks may have to tell one another
``foreign``        CuPy and torch, if the user has imported them
``context``        what calls run on: machine, plans, GPUs, transport; ``bootstrap`` has the steps that agree on them
``outlook``        how calls will be made, as far as that is known before a communicator opens
``children``       what communicators take over that are made from another one, until they open and as they do, and
                   what they leave to the next
``calls_without_program``  MPI's own collectives, barriers, and calls that a rank refuses, so that all ranks do
``delegation``     what MPI must find equal on all ranks in a call that it makes
``cuda``           the same for GPU memory
``guard``          MPI's own methods that take buffers, and what each does with GPU memory
``ranks``          what has brought the ranks together: MPI, or a key-value store
``shrinking``      those of them that are left go on: ``comm.shrink()``
``growing``        they go on with further ones: ``comm.grow()``
``in_thread``      work of MPI's, or of a store, that waits without a deadline: it is polled
``requests``       non-blocking and persistent requests, and the thread that makes what C cannot begin
``inspection``     what a communicator says of itself
``process_exit``   how a process ends, and the job with it
"""
