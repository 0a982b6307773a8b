"""The doctor's findings, each on a job that was never run."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from blinkmpi.doctor.diagnosis import judge
from blinkmpi.doctor.report import Finding, MpiFacts, PeerTrial, RankFacts, Report, SelfTest
from blinkmpi.topology.gpu import GpuFacts, Unknown, known
from tests.unit.topology.test_probe import recorded

MPI = MpiFacts(
    "Open MPI v5.0.11", "3.1", "4.1.2", "/lib/libmpi.so.40", "MULTIPLE", "started by Open MPI's mpirun", 4, 4
)
GIB = 1 << 30


def seen(rank: int, **change: Any) -> RankFacts:
    """A rank of a healthy job of four on CPUs."""
    healthy = RankFacts(
        rank=rank, host="vm", place="0/boot/7", cores=(0, 1, 2, 3), python="3.11.7",
        packages={"blinkmpi": "0.1.0", "numpy": "2.4.6", "mpi4py": "4.1.2"}, environment={}, unknown=(),
        settings_error="", compiler="cc", shm_free=4 * GIB, shm_size=8 * GIB, slots_bytes=8 << 20, skew_s=0.0,
        gpus_here=(), no_gpu="no driver", mpi=MPI,
    )  # fmt: skip
    return replace(healthy, **change)


def alike(**change: Any) -> list[RankFacts]:
    """Four ranks, all changed."""
    return [seen(rank, **change) for rank in range(4)]


def odd(**change: Any) -> list[RankFacts]:
    """Four ranks, of which rank 1 is different."""
    return [seen(rank, **(change if rank == 1 else {})) for rank in range(4)]


def gpu_job(name: str = "nvml-h200x8", **change: Any) -> list[RankFacts]:
    """Four ranks, each on a GPU of a recorded machine."""
    facts = recorded(name)
    buses = tuple(str(f.bus) for f in facts)
    parts = {"cupy-cuda13x": "14.2.0", "nvidia-cuda-nvrtc": "13.0.88", "blinkmpi": "0.1.0", "numpy": "2.4.6"}
    return [
        seen(rank, **{"gpu": facts[rank], "gpus_here": buses, "no_gpu": "", "packages": parts, **change})
        for rank in range(4)
    ]


def finding(report: Report, check: str, at: int = 0) -> Finding:
    found = [line for line in report.findings if line.check == check]
    assert found, [line.check for line in report.findings]
    return found[at]


def test_a_healthy_job_on_cpus() -> None:
    report = judge(alike())
    assert report.healthy
    assert {line.state for line in report.findings} == {"ok", "n/a"}
    assert finding(report, "CUDA-aware MPI").evidence == "not applicable: no rank has a GPU"
    assert "no driver" in finding(report, "GPUs").evidence
    assert finding(report, "hosts").evidence == "4 ranks on vm"


def test_a_healthy_job_on_two_nodes() -> None:
    report = judge(odd(place="1/boot/8", host="b"))
    assert finding(report, "hosts") == Finding("hosts", "ok", "2 nodes: 3 ranks on vm, 1 rank on b")


def test_a_healthy_job_on_gpus() -> None:
    pairs = [tuple(PeerTrial(p, "") for p in range(4) if p != r) for r in range(4)]
    report = judge([replace(s, pairs=pairs[s.rank]) for s in gpu_job()], SelfTest(True, False, "SIGSEGV"))
    assert report.healthy
    assert not [line for line in report.findings if line.state in ("warn", "fail")]
    assert finding(report, "GPUs").evidence == "4 x NVIDIA H200, driver 580.159.04"
    assert finding(report, "NVLinks").evidence == "18 up a GPU"
    assert "(12 times)" in finding(report, "peers").evidence
    assert "driver for CUDA 13.0" in finding(report, "CUDA").evidence
    assert "SIGSEGV): chunks for other nodes are staged" in finding(report, "CUDA-aware MPI").evidence


def with_facts(change: Any, *ranks: int, name: str = "nvml-h200x8") -> list[RankFacts]:
    """A job on GPUs, the facts of some of them changed."""
    made = gpu_job(name)
    for rank in ranks:
        facts = made[rank].gpu
        assert facts is not None
        made[rank] = replace(made[rank], gpu=change(facts))
    return made


def changed(*ranks: int, name: str = "nvml-h200x8", **fields: Any) -> list[RankFacts]:
    """A job on GPUs, of which some have other facts."""
    return with_facts(lambda facts: replace(facts, **fields), *ranks, name=name)


def denied(facts: GpuFacts) -> GpuFacts:
    return replace(facts, peers=tuple(replace(p, read="chipset not supported") for p in known(facts.peers) or ()))


def one_down(facts: GpuFacts) -> GpuFacts:
    links = known(facts.nvlinks) or ()
    return replace(facts, nvlinks=(replace(links[0], active=False), *links[1:]))


@pytest.mark.parametrize(("ranks", "check", "state", "said", "remedy"), [
    (alike(mpi=None, no_mpi="cannot load libmpi"), "MPI", "fail", "cannot load libmpi", "blinkmpi[mpi]"),
    (alike(mpi=replace(MPI, size=1)), "start", "fail", "started 4 processes, MPI sees 1", "--mpi=pmix"),
    (alike(mpi=replace(MPI, size=1, implementation="MPICH 5")), "start", "fail", "each is alone", "--mpi=pmi2"),
    (alike(mpi=replace(MPI, threads="SERIALIZED")), "threads", "warn", "THREAD_SERIALIZED", "thread_level"),
    (odd(packages={"blinkmpi": "9"}), "versions", "fail", "blinkmpi differs: 0.1.0 on ranks 0, 2-3; 9 on rank 1",
     "same environment"),
    (odd(python="3.12.1"), "versions", "warn", "Python differs", "same environment"),
    (odd(place="1/boot/8"), "hosts", "warn", "rank 1 say vm|ranks 0-3 say vm", "different names"),
    (odd(place="1", host="b", skew_s=-0.5), "clocks", "warn", r"500\.0 ms .*rank 1, b", "chrony"),
    (alike(cores=(0,)), "cores", "warn", "may use one core only", "--bind-to none"),
    (alike(cores=(0, 1)), "cores", "warn", "4 ranks on 2 cores", "mpi_yield_when_idle 1"),
    (odd(compiler=""), "compiler", "warn", "none on rank 1", "install cc"),
    (alike(shm_free=3 << 20, shm_size=64 << 20), "/dev/shm", "fail", "3 of 64 MiB free, 4 ranks take 32", "--shm-size"),
    (alike(shm_free=20 << 20, shm_size=64 << 20), "/dev/shm", "warn", "20 of 64 MiB", "BLINKMPI_BUFFSIZE"),
    (alike(shm_free=Unknown("/dev/shm: No such file")), "/dev/shm", "fail", "No such file", "tmpfs"),
    (alike(settings_error="BLINKMPI_TIMEOUT='x'"), "settings", "fail", "ranks 0-3: BLINKMPI_TIMEOUT", "correct"),
    (alike(unknown=("BLINKMPI_DEBG is unknown; did you mean BLINKMPI_DEBUG?",)), "settings", "warn",
     "did you mean BLINKMPI_DEBUG", "correct the name"),
    (odd(environment={"BLINKMPI_ALGO": "x"}), "settings", "fail", "different BLINKMPI_ variables", "alike"),
    (alike(environment={"BLINKMPI_GRAPH_FILE": "p"}), "settings", "warn", "without BLINKMPI_TOPO_FILE", "both"),
    (alike(environment={"BLINKMPI_EXECUTOR": "c"}, compiler=""), "settings", "fail", "no C compiler", "auto"),
    (alike(environment={"NCCL_P2P_DISABLE": "1"}), "environment", "warn", "through host memory", "unset"),
    (with_facts(lambda _: recorded("nvml-h200x8")[0], 2), "binding", "fail",
     "ranks 0, 2 share NVIDIA H200 at 0000:00:06.0", "one rank per GPU"),
    ([replace(s, environment={"BLINKMPI_RANKS_PER_GPU": "2"})
      for s in with_facts(lambda _: recorded("nvml-h200x8")[0], 2)],
     "binding", "warn", "ranks 0, 2 share NVIDIA H200", "one rank per GPU"),
    ([replace(s, gpus_here=(str(s.gpu.bus),)) for s in gpu_job() if s.gpu], "isolation", "fail",
     "see their own GPU alone", "--tres-bind=gres/gpu:none"),
    ([replace(s, environment={"CUDA_VISIBLE_DEVICES": str(s.rank)}) for s in gpu_job()], "isolation", "warn",
     "leaves each rank of vm one GPU", "--gpu-bind=none"),
    (changed(1, mig=True), "MIG", "fail", "rank 1", "-mig 0"),
    (with_facts(one_down, 3), "NVLinks", "warn", "rank 3: 17 of 18 up; down: 0", "nvidia-smi nvlink -s"),
    (with_facts(one_down, 1, name="nvml-dgx-1p"), "NVLinks", "warn", "rank 1: 3 of 4 up", "nvidia-smi nvlink"),
    (changed(0, 1, 2, 3, fabric="in progress"), "fabric", "fail", "ranks 0-3: no NVLink", "nvidia-fabricmanager"),
    (changed(0, confidential=True), "confidential", "warn", "rank 0", "multi-GPU"),
    (changed(2, pcie_width=8), "PCIe", "warn", "rank 2: .* x8 of x16", "slot"),
    (with_facts(denied, 1), "peers", "fail", "1>0, 1>2, 1>3: peer access chipset not supported", "--ipc=host"),
    (gpu_job(pairs=(PeerTrial(2, "cudaErrorInvalidDevice"),)), "peers", "fail",
     "0>2, 1>2, 2>2, 3>2: cudaErrorInvalid", "--gpu-bind=none"),
    (gpu_job(gpu=None, no_gpu="CuPy is missing"), "GPUs", "warn", "NVML shows 8 GPUs; none for ranks 0-3: CuPy",
     "cuda13"),
    ([replace(s, gpus_here=(), **({"gpu": None, "no_gpu": "none left"} if s.rank else {})) for s in gpu_job()], "GPUs",
     "warn", "ranks 1-3 without a GPU: none left", "one rank per GPU"),
    (changed(0, nvlinks=Unknown("NotInstalled: x")), "GPUs", "warn", "NVLinks unknown: NotInst", "nvidia-ml-py"),
    (gpu_job(packages={"cupy-cuda12x": "14", "cupy-cuda13x": "14"}), "CUDA", "fail", "several CuPy", "uninstall"),
    (gpu_job(packages={}), "CUDA", "warn", "not installed", "cuda13"),
    (changed(0, cuda=12080), "CUDA", "fail", "driver is older than CuPy's", "blinkmpi[cuda12]"),
    (changed(0, 1, 2, 3, cuda=13000, name="nvml-dgx-1v"), "CUDA", "fail", "NVRTC 13 knows no Tesla V100",
     "blinkmpi[cuda12]"),
    (gpu_job(packages={"cupy-cuda13x": "14", "nvidia-cuda-nvrtc-cu12": "12.9"}), "CUDA", "fail",
     "not of CuPy's generation", "blinkmpi[cuda13]"),
])  # fmt: skip
def test_what_is_wrong(ranks: list[RankFacts], check: str, state: str, said: str, remedy: str) -> None:
    report = judge(ranks)
    lines = [line for line in report.findings if line.check == check and re.search(said, line.evidence)]
    assert [(line.state, remedy in line.remedy) for line in lines] == [(state, True)], report.findings
    assert state != "fail" or not report.healthy


def test_free_ports_of_a_bridge_are_not_down() -> None:
    """Direct links with as many up on every GPU of the model: boards with bridges have free ports."""
    report = judge(with_facts(one_down, 0, 1, 2, 3, name="nvml-dgx-1v"))
    assert finding(report, "NVLinks") == Finding("NVLinks", "ok", "5 up a GPU")


@pytest.mark.parametrize(("claim", "test", "state", "said"), [
    ("yes", None, "ok", "MPIX_Query_cuda_support: yes"),
    ("no", None, "n/a", "staged in pinned host memory"),
    ("yes", SelfTest(True, True, ""), "ok", "a child job sent GPU memory correctly ("),
    ("no", SelfTest(True, True, ""), "ok", "correctly, though nothing here says so"),
    ("yes", SelfTest(True, False, "SIGSEGV"), "fail", "yes, but the child job ended with SIGSEGV"),
    ("yes", SelfTest(True, False, "wrong data"), "fail", "wrong data"),
    ("no", SelfTest(False, False, "no mpirun"), "n/a", "self-test not run: no mpirun"),
])  # fmt: skip
def test_claims_about_gpu_memory_and_their_proof(claim: str, test: SelfTest | None, state: str, said: str) -> None:
    mpi = replace(MPI, cuda=(("MPIX_Query_cuda_support", claim),))
    line = finding(judge(gpu_job(mpi=mpi), test), "CUDA-aware MPI")
    assert (line.state, said in line.evidence) == (state, True), line
    assert bool(line.remedy) == (state == "fail" or "nothing here says so" in said)
