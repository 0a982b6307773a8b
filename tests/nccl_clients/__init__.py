"""Programs of others that use NCCL, with the door and without: ``make nccl-clients``.

``build``           makes nccl-tests for a machine without network
``ahead``           compiles the door's kernels before
``ways``            a program with the door before NCCL, and without; whose its calls were
``site``            tells that as each process ends
``nccl_tests``      nccl-tests: their tables
``rank``            one of them in a process with Python
``suites``          torch's tests of NCCL: their outcomes
``suite_rank``      the process that runs some of them
``training``        other libraries' trainings, and decoding: losses and steps
``programs``        these programs
``campaign``        random programs with faults: what hangs
``campaign_rank``   a rank of one
"""
