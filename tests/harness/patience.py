"""How long a test waits: the two times that assertions may name, so that no test measures the machine.

Both are for a machine whose cores are all taken, by a second run of these tests or by programs that spin.
"""

# What takes a fraction of a second on an idle machine may take so long, behind the event or the deadline that starts
# it: a rank gets a core ten times as seldom, and starts again what it keeps in no cache.
PATIENCE_S = 20.0

# A deadline of ours that must not pass, longer than any test may take: what comes earlier came for another reason.
NEVER_S = 600.0
