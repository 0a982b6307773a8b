"""Memory for the user's arrays that all ranks of the node have mapped, and memory of others that can be shared so.

* ``blocks.c`` cuts blocks out of a pool's chunks, for torch and CuPy; ``blocks.py`` is the way to it from Python;
* ``pool`` makes a pool: chunks of memory that all ranks register together, before anything lies in them;
* ``for_cupy`` has CuPy allocate from it (``blinkmpi.torch.memory`` has torch);
* ``parts`` shares what others make by virtual memory management, such as torch's expandable segments;
* ``descriptors`` passes its file descriptors from process to process, over Unix sockets;
* ``virtual_memory`` is the part of CUDA's driver that maps it.
"""
