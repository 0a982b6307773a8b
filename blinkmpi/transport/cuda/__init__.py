"""The CUDA transport: one rank per GPU, peers' memory mapped by CUDA IPC, stages of a program as groups of CTAs.

* ``device`` alone uses CuPy and the driver: memory, IPC, streams, compilation, launches;
* ``memory_layout`` lays out the symmetric memory that every rank maps of every other, ``symmetric_memory`` maps it;
* ``regions`` maps registered buffers, ``memory/`` has pools for users' arrays;
* ``codegen`` makes the source and the table of a kernel from a program, ``kernel_layout`` the structs that they share;
* ``stage_tables`` keeps tables on the device, each for calls of many counts;
* ``transport`` loads and launches calls, as a ``loaded_kernel`` each;
* ``order`` puts one call of the process behind the other, on whatever streams and in whatever graphs;
* ``messages`` go from one rank to another, by a FIFO for each ordered pair;
* ``blocks`` are those of a call, each of a length and at a place of its own;
* ``packets`` and ``direct_segments`` say which rank moves what in the protocols of one-hop trees;
* ``host_slots`` and ``network_channels`` have the slots of channels by the host's path and to other nodes;
* ``failure_report`` is what an aborted kernel leaves, ``link_rates`` what ``blinkmpi topo --measure`` times;
* ``kernels/`` has the CUDA C++: ``stages.cu`` runs any program through slots, ``direct.cu`` one-hop trees between
  registered buffers, ``packets.cu`` one-hop trees for short vectors, in the packets of ``ll16.cuh`` or ``ll128.cuh``,
  ``messages.cu`` moves a message and ``blocks.cu`` blocks, both by the FIFOs of ``fifo.cuh``; ``gate.cu`` waits for all
  ranks before a long call.
"""
