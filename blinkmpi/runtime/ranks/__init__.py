"""What has brought the ranks of a communicator together: MPI (``mpi``), or a key-value store (``store``).

``interface`` says what a communicator's context asks of either.
"""
