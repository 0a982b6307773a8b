"""``blinkmpi top``: what running jobs do, read from the memory that their ranks share; it costs them nothing.

``find`` finds the communicators of this user's jobs on this machine, ``look`` reads one, ``view`` shows frames of it.
"""
