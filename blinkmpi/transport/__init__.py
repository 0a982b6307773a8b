"""How bytes move: executors of Programs (Blink section 4, CodeGen).

A transport sees programs, never trees, and never another transport. The calls,
in this order on every rank::

    transport = HostTransport(comm, machine...)      # collective
    loaded = transport.load(program)                 # local; cached by whoever calls
    transport.call(loaded, seq, text, send, recv, timeout_s)   # all ranks make the same call; blocks
    transport.enter(seq, text, timeout_s)            # a call that moves no data of ours: all ranks have come
    transport.close()                                # collective, unless the communicator is dead

``host`` moves bytes between the CPU ranks of one node through shared memory.
"""
