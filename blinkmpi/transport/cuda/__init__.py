"""Programs on GPUs: one rank per GPU, peers' memory mapped by CUDA IPC, stages as groups of CTAs.

* ``device`` is the one home of CuPy and of the driver: memory, IPC, streams, compilation, launches;
* ``arena`` lays out the memory that every rank maps of every other: flags, packet boxes, slots; registered buffers;
* ``code`` makes the source and the table of a kernel from a program (CodeGen);
* ``transport`` executes calls;
* ``common.cuh`` and the three ``.cu`` files are the kernels: ``stages`` runs any program through slots, ``packets`` and
  ``direct`` run one-hop trees, the first for short vectors, the second between registered buffers.
"""
