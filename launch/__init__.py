"""What surrounds a job: the files and command lines of the launchers.

``hostfile`` reads and writes the dialects of Open MPI and Hydra. Nothing here starts a process or
touches MPI; imports come from ``errors``, ``codec`` and ``topology`` alone.
"""
