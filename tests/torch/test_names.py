"""Programs that name another backend, unchanged: ``blinkmpi run --backend-for gloo,nccl``."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blinkmpi.torch.names import backend_for
from tests.harness import ROOT, long_but, run_command

RUN = ("-m", "blinkmpi", "run", "--backend-for", "gloo,nccl")
SECONDS = 90.0
PROGRAM = """
import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import init_process_group, new_group
from torch.distributed.device_mesh import init_device_mesh

name = None if sys.argv[1] == "None" else sys.argv[1]
init_process_group(name, timeout=timedelta(seconds=30)) if name else init_process_group()
rank, n = dist.get_rank(), dist.get_world_size()
x = torch.full((1000,), rank + 1.0)
dist.all_reduce(x)
assert (x == n * (n + 1) / 2).all()
like_it, named, part = new_group(list(range(n))), dist.new_group(backend="gloo"), dist.new_group([0])
for group in like_it, named:
    everybody = [None] * n
    dist.all_gather_object(everybody, {"rank": rank}, group=group)
    assert [one["rank"] for one in everybody] == list(range(n))
mesh = init_device_mesh("cpu", (n,)).get_group()
dist.all_reduce(x, group=mesh)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
late = ""
if name == "gloo":
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    ours = type(like_it).__name__ == "BlinkGroup"
    try:
        if rank and ours:
            time.sleep(3)
        elif ours:
            dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        late = f"{type(error).__name__} {error}"
told = [dist.get_backend(g) for g in (None, like_it, named)] + ([dist.get_backend(part)] if rank == 0 else [])
if rank == 0:
    types = [type(g).__name__ for g in (dist.group.WORLD, like_it, named, part, mesh)]
    print("facts", json.dumps({"told": told, "types": types, "late": late, "argv": sys.argv[1:]}), flush=True)
if not late and name != "gloo":
    dist.destroy_process_group()
"""


def facts(output: str) -> dict[str, Any]:
    return json.loads(output.partition("facts ")[2].partition("\n")[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", long_but(["gloo", "nccl"], ["gloo", "nccl", "None", "cpu:gloo,cuda:nccl"]))
def test_a_program_under_mpirun(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = run_command(2, [sys.executable, *RUN, str(program), name], timeout=SECONDS)
    found = facts(done.output)
    assert found["types"] == ["BlinkGroup"] * 5
    asked = "undefined" if name == "None" else name
    assert found["told"] == [asked, asked, "gloo", asked]
    assert found["argv"] == [name]
    if name == "gloo":
        assert "rank 1" in found["late"], "which monitored_barrier waited for in vain"
    else:
        assert done.rc == 0, done.output


@pytest.mark.parametrize("name", long_but(["None"], ["None", "cpu:gloo"]))
def test_a_program_under_torchrun_is_told_what_torch_tells(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = [str(Path(sys.prefix, "bin", "torchrun")), "--standalone", "--nproc-per-node", "2"]
    told = []
    for words in (), RUN:
        argv = [*start, *words, str(program), name]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
        output = done.stdout + done.stderr
        # on a busy machine torch's own ranks may die at exit (9 of 30 did, ours none): a thread of gloo outlives Python
        assert "facts" in output if not words else done.returncode == 0, output
        found = facts(done.stdout)
        assert found["types"] == ["BlinkGroup" if words else "ProcessGroup"] * 5
        told.append(found["told"])
    assert told[0] == told[1]


def test_a_name_that_torch_does_not_have_is_refused() -> None:
    words = [sys.executable, "-m", "blinkmpi", "run", "--backend-for", "gluu", "-c", "pass"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2
    assert "--backend-for: 'gluu'; name backends of torch.distributed: gloo, nccl, mpi" in done.stderr


@pytest.mark.parametrize("flag", [["--strict"], ["--timeout", "5"]])
def test_flags_of_a_world_that_torchrun_does_not_make_are_refused(flag: list[str]) -> None:
    words = [sys.executable, "-m", "blinkmpi", "run", "--backend-for", "gloo", *flag, "-c", "pass"]
    env = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    assert done.returncode == 2
    assert "--strict, --timeout: they are for calls of MPI.COMM_WORLD, and torchrun starts no MPI" in done.stderr


def test_without_torch_one_error_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')")
    words = [sys.executable, "-m", "blinkmpi", "run", "--backend-for", "gloo", "-c", "pass"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    assert done.returncode == 2
    assert done.stderr == ("blinkmpi: error: --backend-for needs torch: none here; pip install 'blinkmpi[torch]'\n")


@pytest.mark.parametrize(("asked", "names", "cuda", "taken"), [
    ("gloo", ["gloo"], False, "blink"),
    ("GLOO", ["gloo"], False, "blink"),
    ("nccl", ["gloo"], True, None),
    ("blink", ["gloo"], False, None),
    (None, ["gloo"], False, "blink"),
    (None, ["gloo"], True, "cpu:blink,cuda:nccl"),
    (None, ["gloo", "nccl"], True, "blink"),
    (None, ["mpi"], True, None),
    ("cpu:gloo,cuda:nccl", ["gloo", "nccl"], True, "blink"),
    ("cpu:gloo,cuda:nccl", ["nccl"], True, "cpu:gloo,cuda:blink"),
    ("cpu:gloo,xpu:xccl", ["gloo"], False, "cpu:blink,xpu:xccl"),
    ("cpu:mpi", ["gloo"], False, None),
    ("undefined", ["gloo"], False, "blink"),
])  # fmt: skip
def test_the_backend_that_is_taken(asked: str | None, names: list[str], cuda: bool, taken: str | None) -> None:
    assert backend_for(asked, names, cuda=cuda) == taken


STARTS = """
import os, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
os.environ |= dict.fromkeys(names.split(), "as torchrun has it")
"""


@pytest.mark.parametrize("words", ["import blinkmpi.torch; blinkmpi.torch.setenv()", "serve"])
def test_under_torchrun_mpi_is_not_started_before_there_is_a_group(words: str) -> None:
    """On several nodes it starts as the group is made."""
    look = "import sys; assert 'torch' in sys.modules; assert 'mpi4py.MPI' not in sys.modules"
    if words == "serve":
        words = f"from blinkmpi.cli.main import main; sys.exit(main(['run', '--backend-for', 'gloo', '-c', {look!r}]))"
    else:
        words = f"{words}; {look}"
    done = subprocess.run([sys.executable, "-c", STARTS + words], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
