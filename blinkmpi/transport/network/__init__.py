"""Between nodes: MPI messages that carry chunks (``endpoints``), announcements and aborts (``messages``).

And what the ranks find out together, under a deadline (``bounded``): by MPI (``exchanges``) or a store (``store``),
which may be a folder (``folder_store``).
``job_numbers`` tells MPI's processes apart, also those that come later.
"""
