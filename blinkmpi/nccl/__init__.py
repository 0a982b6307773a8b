"""Programs that use NCCL, unchanged: with calls of ours in NCCL's place, or counted.

``count.c``     the library between a program and NCCL that counts calls and passes them on
``own.h``       NCCL's own functions, behind those that have their names
``by_name.c``   what programs open that take NCCL's library by name
``library``     both, compiled; where NCCL is; the environment in which a program meets them
``counts``      what processes counted, read from their pages and added up
``door``        the library that makes some of the calls
``inside``      where it comes into the Python of an unchanged program
``opening``     how the ranks of a communicator open their GPUs together
``binder``      kinds of calls become records, which the door launches
``beside``      times of these calls, and of NCCL's
``table``       which are faster, as measured
``status``      whose a process's calls are, and why
"""
