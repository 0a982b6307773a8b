"""Whether MPI takes GPU memory: the sources that say so, in order, and what the ranks agree on.

Nothing is tried here, because an MPI that does not take it dies of SIGSEGV; ``blinkmpi doctor`` tries it in a child
job. mpi4py's module and the communicator are handed in.
"""

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...util.settings import PREFIX
from ...util.together import Comm, allgather

OWN = f"{PREFIX}CUDA_AWARE"
VENDORS = ("MPICH_GPU_SUPPORT_ENABLED", "MV2_USE_CUDA")
Answers = Sequence[tuple[str, str]]  # (source that is asked, its answer: yes, no or absent)


def answers_of(mpi: Any, path: str, env: Mapping[str, str] | None = None) -> tuple[tuple[str, str], ...]:
    """Who says that this MPI takes GPU memory: the user, MPI 4.1's info, the library's query, vendors' variables.

    Args:
        path: the file of libmpi.
    """
    env = os.environ if env is None else env
    found: list[tuple[str, str]] = []
    if env.get(OWN):
        found.append((OWN, "yes" if env[OWN] == "1" else "no"))
    info = mpi.COMM_WORLD.Get_info()
    kinds = info.get("mpi_memory_alloc_kinds") or ""
    info.Free()
    found.append(("mpi_memory_alloc_kinds", "yes" if "cuda" in kinds else "no" if kinds else "absent"))
    found.append(("MPIX_Query_cuda_support", _query(path)))
    found += [(name, "yes" if env[name] == "1" else "no") for name in VENDORS if name in env]
    return tuple(found)


def claimed(found: Answers) -> bool:
    """Whether an answer is yes: the user's, or else any other."""
    answers = [answer for name, answer in found if name == OWN] or [answer for _, answer in found]
    return "yes" in answers


def words(found: Answers) -> str:
    """All answers, as people read them."""
    return "; ".join(f"{name}: {answer}" for name, answer in found) or "nobody says so"


def agree(comm: Comm, asserted: bool | None, ask: Callable[[], Answers]) -> tuple[bool, str]:
    """Whether chunks for other nodes go to MPI from GPU memory, and why; collective, the same on all ranks.

    Args:
        asserted: what the job's settings say; None: nothing.
        ask: gives this rank's answers.
    """
    mine = ((OWN, "yes" if asserted else "no"),) if asserted is not None else tuple(ask())
    found = allgather(comm, (claimed(mine), words(mine)), tuple[bool, str])
    for rank, (yes, said) in enumerate(found):
        if not yes:
            why = said if asserted is not None else f"rank {rank} knows of no MPI that takes GPU memory: {said}"
            return False, f"staged in pinned host memory ({why})"
    return True, f"sent by MPI from GPU memory ({found[0][1]})"


def known(mpi: Any) -> tuple[bool, str]:
    """Whether this process knows its MPI to take GPU memory, and who says so; local, and asked once."""
    return _known(mpi, os.environ.get(OWN, ""))


@cache
def _known(mpi: Any, _: str) -> tuple[bool, str]:
    found = answers_of(mpi, library_path())
    return claimed(found), words(found)


def library_path() -> str:
    """The file of libmpi in this process; empty if it cannot be found."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\s(/\S*/libmpi(?:\.so|_cray|-)?\S*)$", maps, re.MULTILINE)
    return found[1] if found else ""


def _query(path: str) -> str:
    """What MPIX_Query_cuda_support of the loaded library answers."""
    if not path:
        return "absent"
    try:
        return "yes" if ctypes.CDLL(path).MPIX_Query_cuda_support() == 1 else "no"
    except (OSError, AttributeError):
        return "absent"
