"""``grow``: the ranks of a communicator go on in a larger one, together with processes that join them.

``wanted`` checks what is asked, and says what the new ranks take over; ``by_mpi`` has MPI start processes and makes a
communicator with them; ``by_store`` waits for processes that come to a key-value store.
"""
