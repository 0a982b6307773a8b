"""The command line: ``main`` has the table of commands; a module named after a command has its flags and its answer.

``machine``      which machine a command is about; ``live`` the live one
``calls``        the flags of a call
``differences``  what ``--diff`` prints
``numbers``      numbers as users write them
``output``       where answers and errors go; ``show`` has the tables
"""
