"""Seeded faults: one line of the program is made wrong, and the test that shall see it must fail.

``python -m tests.mutants`` does so with every record of ``mutants.toml``, one after another, on a copy of the tree.

``__main__``      the command line, and the table that it prints
``records``       the list, read and checked
``copies``        copies of the tree, with one fault at a time, in which pytest runs
``outcomes``      a plugin of pytest that writes down how each test ended
``mutants.toml``  the list: file, the line as it is, the line made wrong, what that is, and the test
"""
