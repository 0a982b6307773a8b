"""A campaign: random mixed calls and faults, drawn from a seed that is printed, every result checked.

``python -m tests.campaign --seconds 600 --faults`` starts one job after another without an mpirun of its own.

``__main__``   the command line, and the file that it writes
``jobs``       starts jobs, ends those that hang, and reads what their ranks wrote
``steps``      what is done: from a seed to steps, the same on all ranks
``kinds``      the collectives: their arguments, what is sent, what must arrive
``reference``  inputs, and what is wrong with a result
``memory``, ``gpu_memory``  buffers of calls: margins, odd offsets, freed at once
``rank``, ``doer``, ``record``  the program of a rank: makes the calls, keeps what was wrong
``faults``     faults that a job outlives
``deadly``     faults that end their job
"""
