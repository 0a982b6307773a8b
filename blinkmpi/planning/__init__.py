"""Plans: which packings a job has, and which of them carries a call of which size. Pure.

``plan``         the value: all packings, and the selection table with its rules
``selection``    makes a plan; ``choose`` decides scheme and protocol of a call
``defaults``     the default rows of the table
``gpus``         what calls between GPUs take, and which protocol carries which size
``tuned_table``  rows that ``blinkmpi tune`` has measured
``explain``      says how a call runs, and why
``chunk_search`` finds the chunk of long calls on GPUs while a job runs
``diff``         compares two plans
``subsets``      compares trees with rings on every part of a machine
``advice``       the sets of GPUs of one size, best first
"""
