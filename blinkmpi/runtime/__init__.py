"""A communicator at work: its bootstrap, and the life of a call from arguments to result.

The life of a call:

``dispatch``       a communicator's calls, from its opening to its end: blocking, non-blocking, persistent
``making``         a blocking call is found (``call_keys`` has what by), or bound, and run
``binding``        arguments become a call that can be started
``arguments``      checks mpi4py's arguments of each collective and refuses bad ones; ``buffers`` reads buffer
                   specifications, ``collectives`` has the table of mpi4py's methods
``block_arguments``  checks those of v-variants, whose lengths the ranks may have to tell one another
``agreeing``       what ranks agree on before a call is bound: such lengths, and its part of the plan
``sequence``       the number of a call, the order of all calls, and what ends them
``other_lengths``  tells C of calls that differ from earlier ones in lengths alone
``requests``       non-blocking and persistent requests, and the thread that makes what C cannot begin
``grouping``       several calls as few: ``comm.grouped()``
``cuda``           calls on GPU memory
``calls_without_program``  MPI's own collectives, barriers, and calls that a rank refuses, so that all ranks do
``delegation``     what MPI must find equal on all ranks in a call that it makes
``guard``          MPI's own methods that take buffers, and what each does with GPU memory
``entering``       a barrier with a deadline before what has none: Split and its like, ``register``, ``plan``

What calls run on:

``context``        machine, plans, GPUs, transport; ``bootstrap`` has the steps by which all ranks agree on them
``outlook``        how calls will be made, as far as that is known before a communicator opens
``ranks``          what has brought the ranks together: MPI, or a key-value store
``children``       what a communicator that is made from another one takes over, and leaves to the next
``shrinking``      the ranks that are left go on: ``comm.shrink()``
``growing``        the ranks go on with further ones: ``comm.grow()``
``in_thread``      polls work of MPI's, or of a store, that would wait without a deadline
``inspection``     what a communicator says of itself
``process_exit``   how a process ends, and the job with it
``foreign``        CuPy and torch, if the user has imported them
"""
