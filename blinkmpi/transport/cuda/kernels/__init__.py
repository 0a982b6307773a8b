"""The kernels' sources, and :mod:`.compiler`, which makes machine code of them.

``stages.cu``    slots: any program (``chunks.cuh``)
``packets.cu``   one and two shots (``exchange.cuh``), with packets of ``ll16.cuh`` or ``ll128.cuh``
``direct.cu``    between registered buffers, one hop apart; ``in_place.cuh`` ends a reduce-scatter in place
``messages.cu``  a message, and ``blocks.cu`` a call of blocks, over the FIFOs of ``fifo.cuh``
``segments.cu``  gathers the buffers of a group into a bucket, and scatters it
``gate.cu``      waits for all ranks before a long call
``rates.cu``     what ``blinkmpi topo --measure`` times
``sync.cuh``     flags, fences, deadlines, aborts, barriers; ``layout.cuh`` the structs, ``types.cuh`` the element types
"""
