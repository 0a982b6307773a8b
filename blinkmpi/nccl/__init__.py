"""What programs that use NCCL ask of it, counted while they run unchanged.

``count.c``     the library between a program and NCCL: it counts calls and passes them on
``own.h``       NCCL's own functions, behind those that have their names
``by_name.c``   what programs open that take NCCL's library by name
``library``     both, compiled; where NCCL is; the environment in which a program meets them
``counts``      what processes counted, read from their pages and added up
``door``        a library that is to make some of the calls; no command loads it yet
``binder``      what prepares them: kinds of calls become records, which the door launches
"""
