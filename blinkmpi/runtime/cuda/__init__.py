"""Calls on GPU memory.

``setup``    finds the GPUs of the ranks and agrees on them; ``aware`` asks whether MPI takes their memory
``context``  a communicator's GPUs: plan, kernels, registered buffers; ``memory`` its pool for users' arrays
``templates``  one table for all counts of about one size
``buffers``  reads buffer specifications that show GPU memory, and streams
``calls``    the calls of a communicator: binds them, and tells C of them
``call``     a call that is bound: put its kernel on a stream; ``in_flight`` waits for it and raises what went wrong
``history``  what the calls so far have in common: their number among the ranks, and what they leave
``copies``   what a call copies before its kernel and behind it, and the buckets of groups
``repeating``  what C needs to launch a kernel again, with buffers at other addresses
``other_counts``  calls that differ from earlier ones in their counts alone: C is told of them
``counting``  counts calls and what they move
``operands``  keeps what calls on streams were given; ``watch`` tells of failed replays of graphs
``staging``  point-to-point of GPU memory through host memory, for an MPI that does not take it
"""
