"""Plans: which packings a job has, and which of them carries a call of which size. Pure.

``plan``         the value: all packings, and the selection table with its rules
``planner``      makes a plan, on rank 0; ``on_demand`` a part of it when a call first needs that
``selection``    decides scheme and protocol of a call (``choose``), and makes its program
``defaults``     the default rows of the table, where the cost model decides by ``by_size``;
                 ``memory_rows`` what is left of them without cma, ``slots`` the slots
``gpus``         the rows of GPUs, what their calls take, and which protocol carries which size
``tuned_table``  rows that ``blinkmpi tune`` has measured; ``default_tables`` files of rows that are shipped
``algorithms``   rows of collectives that users write
``explain``      says how a call runs, and why; ``predictor`` how long it takes; ``beside_mpi`` where MPI was faster;
                 ``in_switch`` what sums in the switches would give
``chunk_search`` finds the chunk of long calls on GPUs while a job runs
``diff``         compares two plans
``subsets``      compares trees with rings on every part of a machine
``advice``       the sets of GPUs of one size, best first
"""
