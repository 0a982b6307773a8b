"""The CUDA transport: one rank per GPU, peers' memory mapped by CUDA IPC, stages of a program as groups of CTAs.

* ``device`` is the one home of CuPy and of the driver: memory, IPC, streams, compilation, launches;
* ``memory_layout`` lays out the symmetric memory that every rank maps of every other, and registered buffers;
* ``codegen`` makes the source and the table of a kernel from a program, ``kernel_layout`` the structs that they share;
* ``executor`` loads and launches calls;
* ``kernels`` has the CUDA C++: ``stages.cu`` runs any program through slots, ``packets.cu`` and ``direct.cu`` run
  one-hop trees, the first for short vectors, the second between registered buffers.
"""
