"""The command ``env``: versions, and every setting with its value and where that comes from, to paste into a report."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

from ..doctor.examination import packages
from ..errors import SettingsError
from ..topology.show import table_of
from ..util.settings import KNOWN, PREFIX, read
from ..util.text import brief
from .output import show

OTHERS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LD_PRELOAD")  # of what else changes how a job runs
FAMILIES = ("NCCL_", "OMPI_MCA_", "PMIX_MCA_", "PRTE_MCA_", "UCX_", "MPICH_", "I_MPI_", "TORCH_NCCL_")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--all", action="store_true", help="the settings that are not set, too, with what they are for")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print; 1 if a setting has an impossible value, or a name that does not exist."""
    report = found(os.environ)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        show(_text(report, everything=args.all))
    return 1 if report["wrong"] else 0


def found(environ: Mapping[str, str]) -> dict[str, Any]:
    """What ``env --json`` prints."""
    wrong: tuple[str, ...]
    try:
        wrong = read(environ).unknown
    except SettingsError as error:
        wrong = (str(error),)
    settings = [
        {"name": f"{PREFIX}{name}", "value": environ.get(f"{PREFIX}{name}"), "what": what,
         "from": "environment" if f"{PREFIX}{name}" in environ else "default"}
        for name, what in KNOWN.items()
    ]  # fmt: skip
    others = {k: v for k, v in sorted(environ.items()) if k in OTHERS or k.startswith(FAMILIES)}
    return {
        "format": "blinkmpi.env", "version": 1, "python": platform.python_version(), "system": platform.platform(),
        "packages": packages(), "settings": settings, "others": others, "wrong": list(wrong),
    }  # fmt: skip


def _text(report: Mapping[str, Any], *, everything: bool) -> Any:
    from rich.console import Group
    from rich.text import Text

    versions = ", ".join(f"{name} {version}" for name, version in sorted(report["packages"].items()))
    lines = [Text(f"Python {report['python']}, {report['system']}"), Text(versions)]
    table = table_of("setting", "value...", "from", *(["what it is for..."] if everything else []))
    for setting in report["settings"]:
        if everything or setting["value"] is not None:
            value = "" if setting["value"] is None else brief(setting["value"])
            what = [Text(setting["what"])] if everything else []
            table.add_row(setting["name"], Text(value), setting["from"], *what)
    for name, value in report["others"].items():
        table.add_row(name, Text(brief(value)), "environment", *([""] if everything else []))
    if not table.row_count:
        lines.append(Text("no setting of blinkmpi, MPI, NCCL or CUDA is set; --all shows what there is"))
    return Group(*lines, *([table] if table.row_count else []), *(Text(text, "red") for text in report["wrong"]))
