"""How long a call on CPU ranks will take, from what its steps cost on this machine.

``steps`` lists the steps of a program by kind, ``calibrate`` times each kind with all ranks at work, ``rates`` keeps
what was measured, and ``simulate`` plays a program on the cores that the ranks share (``BySteps``).
"""
