"""torch's own tests of process groups, from its wheel, against backend ``blink``: ``python -m tests.torch_suite``."""
