"""How long a call on CPU ranks will take, from what its steps cost on this machine.

``steps.py`` lists the steps of a program by kind, ``calibrate.py`` times each kind with all ranks at work, ``rates.py``
keeps what was measured, and ``simulate.py`` plays a program on the cores that the ranks share.
"""
