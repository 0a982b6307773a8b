"""The command ``bench``: time and check collectives on all ranks, or start the many jobs of a sweep."""

import argparse

from ..bench.options import add_flags
from .machine import world


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Measure; the exit code."""
    if args.sweep is not None:
        from ..bench.sweep.command import run as run_sweep
        from .launch import version_text

        return run_sweep(args, library=version_text())
    from ..bench.command import run as run_bench

    return run_bench(args, world(args))
