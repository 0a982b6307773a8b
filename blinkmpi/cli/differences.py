"""What two machines or two plans have differently, as ``topo --diff`` and ``plan --diff`` print it."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .output import show


def compared(
    args: argparse.Namespace, kind: str, names: Sequence[str], heads: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> int:
    """Print differences; 1 if there are some, as ``diff`` does."""
    if args.json:
        from ..util.codec import plain

        keys = (*heads, "one", "other")
        body = {"format": f"blinkmpi.{kind}", "version": 1, "one": names[0], "other": names[1],
                "differences": plain([dict(zip(keys, row, strict=True)) for row in rows])}  # fmt: skip
        print(json.dumps(body, indent=1))
    else:
        from . import show as cli_show

        show(cli_show.compared([Path(name).name for name in names], heads, rows))
    return int(bool(rows))
