"""Calls on GPU memory.

``setup``    finds the GPUs of the ranks and agrees on them; ``aware`` asks whether MPI takes their memory
``context``  a communicator's GPUs: plan, kernels, registered buffers
``templates``  one table for all counts of about one size
``buffers``  reads buffer specifications that show GPU memory, and streams
``operands``  keeps what calls on streams were given; ``watch`` tells of failed replays of graphs
``calls``    the life of a call: put its kernel on a stream, wait for it, raise what went wrong
"""
