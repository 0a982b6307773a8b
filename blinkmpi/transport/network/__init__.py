"""Between nodes: messages of MPI that carry chunks, calls and errors."""
