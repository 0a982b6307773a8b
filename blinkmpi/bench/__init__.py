"""``blinkmpi bench``: nccl-tests' rows for our collectives, MPI's and NCCL's, side by side."""
