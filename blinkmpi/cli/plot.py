"""The command ``plot``: draw what ``bench`` measured."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("results", nargs="+", metavar="RESULT", help="files that bench -J wrote")
    parser.add_argument("-o", metavar="FILE", dest="output", required=True, help="the picture: .svg, .png or .pdf")
    parser.add_argument("--in-place", action="store_true", help="the calls in place, not those out of place")


def run(args: argparse.Namespace) -> int:
    """Draw; the exit code."""
    from ..bench.plot_sizes import draw

    draw(args.results, args.output, in_place=args.in_place)
    return 0
