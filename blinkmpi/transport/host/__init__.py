"""Programs on CPU ranks of a node, in shared memory.

``transport``        opens and loads; waits, times out, looks after the peers
``outlook``          what is known of it before it opens
``own_records``      where a rank announces its calls
``executor.c``       the C executor, which makes a rank's part of a call: ranks meet (``meeting.h``, ``waiting.h``) and
                     do their stages (``stages.h``, ``reduction.h``, ``single_copy.h``), as ``native_rows`` writes
                     them; ``native`` compiles and loads it, and ``c_structs`` reads the structures that both know
``numpy_executor``   the same in NumPy, where there is no C compiler
``host_program``     a program with addresses in place of channels; ``channel_layout`` says where these lie, ``traffic``
                     what it moves
``host_call``        a program bound to buffers and a deadline
``block_call``       a call of blocks (``blocks.h``), whose ranks need not know all lengths; ``block_memory`` says where
                     these lie between the ranks
``count_kind``       calls that differ in their counts: C fills in one program (``count_kinds.h``)
``shared_window``    the memory that the ranks share
``shots``            messages of calls in one shot to other nodes
``single_copy``      the protocol ``cma``: chunks are read straight from their writer's buffer
``repeated``         calls and groups that were made before, which C finds and makes again (``repeated_calls.h``):
                     what the user passes (``arguments.h``, ``device_arrays.h``), the table (``kept_calls.h``), calls
                     of other lengths (``kinds.h``), groups (``repeated_groups.h``), launches on a stream
                     (``launches.h``; of blocks, ``block_launches.h``)
``pending_calls``    non-blocking calls, which C begins and moves on (``pending_calls.h``)
``mpi_functions``    the addresses of MPI's functions, for C
``compiling``        has a library that takes long compiled by another process
``capabilities``     whether all ranks have the C executor, and may read one another's memory
"""
