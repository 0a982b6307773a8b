"""A communicator at work: its bootstrap, and the life of a call from arguments to result."""
