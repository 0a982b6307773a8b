"""Programs on CPU ranks: shared memory in a node, executors in C and NumPy."""
