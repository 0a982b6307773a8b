"""The command line: ``main`` has the parser; a module named after a command has that command."""
