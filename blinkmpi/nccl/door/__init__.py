"""The door: a library between a program and NCCL that makes those calls which all ranks can make without NCCL.

``door.c``    the functions that a program calls in NCCL's place, the table of communicators, and two threads
``rules.h``   which calls may be ours at all
``agree.h``   from which call on they are: the agreement of a communicator's ranks
``sign.h``    how these find each other, before and behind NCCL's init
``page.h``    the memory that they share
``binder.h``  what prepares and makes the calls
``python.h``  how it asks the Python in the process for a binder
``status.h``  what it says of itself to those who look
``record.h``  how a call is launched that :mod:`..binder` has prepared the kind of
"""
