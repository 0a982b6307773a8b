"""``shrink``: the ranks that are left when others are lost, or are to go, go on in a communicator of their own.

``meeting`` finds out who is left, by what the ranks of a node see of one another; ``by_mpi`` has MPI make the new
communicator, by ULFM where a process has died; ``by_store`` makes it over a key-value store.
``leaving_gpus`` unmaps the other ranks' GPU memory before.
"""
