"""Between nodes: MPI messages that carry chunks (``endpoints``), announcements and aborts (``messages``)."""
