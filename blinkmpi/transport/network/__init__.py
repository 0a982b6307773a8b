"""Between nodes: MPI messages that carry chunks (``endpoints``), announcements and aborts (``messages``).

And what the ranks find out together, under a deadline (``bounded``): by MPI (``exchanges``) or a store (``store``).
"""
