"""How bytes move: executors of Programs (Blink section 4, CodeGen).

A transport sees programs, never trees, and never another transport. The calls,
in this order on every rank::

    transport = HostTransport(comm, machine...)      # collective
    loaded = transport.load(program)                 # local; cached by whoever calls
    transport.enter(seq, text)                       # all ranks have come, with the same call
    transport.run(loaded, send, recv, timeout_s)     # blocks
    transport.close()                                # collective, unless the communicator is dead

``host`` moves bytes between the CPU ranks of one node through shared memory.
"""
