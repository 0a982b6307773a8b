"""CuPy and torch, if the user has imported them: an array of theirs among a call's arguments shows that they are there.

Nothing here imports them.
"""

import sys
from collections.abc import Callable
from typing import Any

# imported("torch"): the module, or None. The dictionary's own method: each call that is not found by C asks it twice.
imported: Callable[[str], Any] = sys.modules.get
