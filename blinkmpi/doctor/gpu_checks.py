"""The doctor's findings about GPUs: which rank has which, whether they reach each other, whether versions fit. Pure."""

import re
from collections.abc import Sequence

from ..runtime.cuda.aware import OWN, claimed, words
from ..topology.gpu import GpuFacts, Unknown, known
from ..topology.gpu_topology import FABRIC_READY
from ..util.text import plural, ranks_text, whole_number
from .report import Finding, Findings, RankFacts, SelfTest, fail, groups, not_applicable, ok, warn

BIND = "srun --gpus-per-node=8 --gpu-bind=none (newer Slurm: also --tres-bind=gres/gpu:none)"


def _with_gpu(seen: Sequence[RankFacts]) -> list[tuple[int, GpuFacts]]:
    return [(s.rank, s.gpu) for s in seen if s.gpu is not None]


def _gpus(seen: Sequence[RankFacts]) -> Findings:
    mine, shown = _with_gpu(seen), max(len(s.gpus_here) for s in seen)
    without = [s for s in seen if s.gpu is None]
    if not shown and not mine:
        yield not_applicable("GPUs", f"no GPU here: {seen[0].no_gpu}; ranks run on CPUs")
    elif without and shown:
        here = f"NVML shows {plural(shown, 'GPU')}; none for {ranks_text([s.rank for s in without])}"
        remedy = "pip install 'blinkmpi[cuda13]' (or [cuda12]); see what CUDA_VISIBLE_DEVICES and the container leave"
        yield warn("GPUs", f"{here}: {without[0].no_gpu}", remedy)
    elif without:
        evidence = f"{ranks_text([s.rank for s in without])} without a GPU: {without[0].no_gpu}; all run on CPUs"
        yield warn("GPUs", evidence, "start one rank per GPU")
    else:
        names = groups(seen, lambda s: s.gpu.name if s.gpu and isinstance(s.gpu.name, str) else "GPU")
        drivers = sorted({f.driver for _, f in mine if isinstance(f.driver, str)})
        lost = next((f.nvlinks.reason for _, f in mine if isinstance(f.nvlinks, Unknown)), "")
        words = ", ".join(f"{len(r)} x {name}" for name, r in names.items())
        if lost:
            remedy = "pip install nvidia-ml-py; in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            yield warn("GPUs", f"{words}; NVLinks unknown: {lost}", remedy)
        else:
            yield ok("GPUs", f"{words}, driver {', '.join(drivers) or 'unknown'}")


def _binding(seen: Sequence[RankFacts]) -> Findings:
    """One GPU per rank, and each near its rank's peers."""
    mine = _with_gpu(seen)
    if not mine:
        return
    taken: dict[object, list[int]] = {}
    for rank, f in mine:
        taken.setdefault(f.uuid if isinstance(f.uuid, str) else (seen[rank].place, str(f.bus)), []).append(rank)
    shared = [(ranks, dict(mine)[ranks[0]]) for ranks in taken.values() if len(ranks) > 1]
    for ranks, f in shared:
        allowed = len(ranks) <= (whole_number(seen[ranks[0]].environment.get("BLINKMPI_RANKS_PER_GPU", "")) or 1)
        said = warn if allowed else fail
        yield said("binding", f"{ranks_text(ranks)} share {f.label}", f"one rank per GPU: fewer ranks, or {BIND}")
    if not shared:
        yield ok("binding", f"{plural(len(mine), 'rank')}, each on a GPU of its own")
    for ranks in groups(seen, lambda s: s.place).values():
        alone = [r for r in ranks if len(seen[r].gpus_here) == 1]
        if len(ranks) > 1 and len(alone) > 1 and len({seen[r].gpus_here for r in alone}) > 1:
            evidence = f"{ranks_text(alone)} of {seen[ranks[0]].host} see their own GPU alone"
            yield fail("isolation", f"{evidence}: CUDA IPC cannot open the others' memory", BIND)
        masks = {seen[r].environment.get("CUDA_VISIBLE_DEVICES", "") for r in ranks}
        if len(ranks) > 1 and len(masks) > 1 and all(m and "," not in m for m in masks) and len(alone) < 2:
            evidence = f"CUDA_VISIBLE_DEVICES leaves each rank of {seen[ranks[0]].host} one GPU"
            remedy = f"leave all GPUs visible to all ranks: {BIND}"
            yield warn("isolation", f"{evidence}: CUDA IPC between them may be refused", remedy)


def _mig(seen: Sequence[RankFacts]) -> Findings:
    ranks = [r for r, f in _with_gpu(seen) if f.mig is True]
    if ranks:
        yield fail("MIG", f"on for the GPUs of {ranks_text(ranks)}: no NVLink and no peer access",
                   "nvidia-smi -i INDEX -mig 0, or take other GPUs")  # fmt: skip


def _nvlinks(seen: Sequence[RankFacts]) -> Findings:
    """A link counts as down if others of the same GPU are up; unused ports show on GPUs of the same model."""
    ports = {r: links for r, f in _with_gpu(seen) if (links := known(f.nvlinks))}
    counts = {r: (sum(k.active is True for k in links), links) for r, links in ports.items()}
    names = {r: str(f.name) for r, f in _with_gpu(seen)}
    most = {name: max(n for r, (n, _) in counts.items() if names[r] == name) for name in {names[r] for r in counts}}
    bad = False
    for rank, (up, links) in counts.items():
        down = [k.number for k in links if k.active is False]
        switched = any(k.remote in ("switch", "hidden switch") for k in links if k.active is True)
        if up and down and (switched or up < most[names[rank]]):
            bad = True
            yield warn("NVLinks", f"rank {rank}: {up} of {len(links)} up; down: {', '.join(map(str, down))}",
                       "nvidia-smi nvlink -s; reset or replace the GPU. Plans avoid the link meanwhile")  # fmt: skip
    if counts and not bad:
        ends = sorted({number for number, _ in counts.values()})
        span = "-".join(map(str, dict.fromkeys((ends[0], ends[-1]))))
        yield Finding("NVLinks", "ok" if ends[-1] else "n/a", f"{span} up a GPU")
    elif not counts and any(f.nvlinks == () for _, f in _with_gpu(seen)):
        yield not_applicable("NVLinks", "these GPUs have none; PCIe carries all")


def _fabric(seen: Sequence[RankFacts]) -> Findings:
    states: dict[str, list[int]] = {}
    for rank, f in _with_gpu(seen):
        if isinstance(f.fabric, str) and f.fabric not in FABRIC_READY:
            states.setdefault(f.fabric, []).append(rank)
    for state, ranks in states.items():
        evidence = f"NVSwitch fabric {state} for the GPUs of {ranks_text(ranks)}: no NVLink"
        yield fail("fabric", evidence, "systemctl start nvidia-fabricmanager (its version must be the driver's)")


def _confidential(seen: Sequence[RankFacts]) -> Findings:
    ranks = [r for r, f in _with_gpu(seen) if f.confidential is True]
    if ranks:
        evidence = f"confidential computing is on ({ranks_text(ranks)}): peer access may be refused"
        yield warn("confidential", evidence, "see the line on peers; use its multi-GPU mode, or none")


def _pcie(seen: Sequence[RankFacts]) -> Findings:
    for rank, f in _with_gpu(seen):
        now, most = known(f.pcie_width), known(f.pcie_width_max)
        if now and most and now < most:
            yield warn("PCIe", f"rank {rank}: {f.label} runs x{now} of x{most}", "reseat the card, check the slot")


def _pairs(seen: Sequence[RankFacts]) -> Findings:
    """What NVML says of peers, and what opening their memory gave."""
    if len(_with_gpu(seen)) < 2:
        return
    bus = {r: f.bus for r, f in _with_gpu(seen)}
    denied: dict[str, list[str]] = {}
    for rank, f in _with_gpu(seen):
        for peer in known(f.peers) or ():
            other = next((r for r, b in bus.items() if b == peer.bus and seen[r].place == seen[rank].place), None)
            if other is not None and isinstance(peer.read, str) and peer.read != "ok":
                denied.setdefault(f"peer access {peer.read}", []).append(f"{rank}>{other}")
    for s in seen:
        for pair in s.pairs:
            if pair.error:
                denied.setdefault(pair.error, []).append(f"{s.rank}>{pair.peer}")
    tried = sum(len(s.pairs) for s in seen)
    for text, pairs in denied.items():
        some = ", ".join(pairs[:6]) + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")
        remedy = f"let ranks see each other's GPUs: {BIND}; docker: --ipc=host, one container per node"
        yield fail("peers", f"{some}: {text}", remedy)
    if not denied and tried:
        yield ok("peers", f"every rank opened the others' GPU memory ({tried} times)")
    elif not denied:
        yield not_applicable("peers", "NVML denies no peer access; opening memory was not tried")


def _cuda_versions(seen: Sequence[RankFacts]) -> Findings:
    """Driver, CuPy and NVRTC of one generation, and one that still knows the GPU."""
    if not any(s.gpus_here or s.gpu for s in seen):
        return
    packages, facts = seen[0].packages, [f for _, f in _with_gpu(seen)]
    cupy = {name: version for name, version in packages.items() if name.startswith("cupy")}
    if len(cupy) > 1:
        yield fail("CUDA", f"several CuPy in one environment: {', '.join(sorted(cupy))}", "uninstall all, install one")
        return
    if not cupy:
        yield warn("CUDA", "CuPy is not installed: GPU buffers are refused",
                   "pip install 'blinkmpi[cuda13]' (or [cuda12])")  # fmt: skip
        return
    ((name, version),) = cupy.items()
    major = int(found[1]) if (found := re.search(r"cuda(\d+)x", name)) else None
    driver = min((f.cuda for f in facts if isinstance(f.cuda, int)), default=None)
    old = [f for f in facts if isinstance(f.capability, tuple) and f.capability < (7, 5)]
    nvrtc = {n: v for n, v in packages.items() if "nvrtc" in n}
    words = f"{name} {version}, NVRTC {', '.join(nvrtc.values()) or 'not from pip'}"
    words += f", driver for CUDA {driver // 1000}.{driver % 1000 // 10}" if driver else ""
    other = [v for v in nvrtc.values() if major and int(v.split(".")[0]) != major]
    if major and driver and driver // 1000 < major:
        yield fail("CUDA", f"{words}: the driver is older than CuPy's CUDA",
                   f"a newer driver, or pip install 'blinkmpi[cuda{driver // 1000}]'")  # fmt: skip
    elif major and major >= 13 and old:
        yield fail("CUDA", f"{words}: NVRTC 13 knows no {old[0].name}", "pip install 'blinkmpi[cuda12]'")
    elif other:
        yield fail("CUDA", f"{words}: NVRTC is not of CuPy's generation", f"pip install 'blinkmpi[cuda{major}]'")
    else:
        yield ok("CUDA", words)


def cuda_aware(seen: Sequence[RankFacts], test: SelfTest | None) -> Findings:
    """What MPI claims, then what the child job showed. Our own collectives on one node do not need it."""
    m = seen[0].mpi
    if m is None:
        return
    if not any(s.gpu for s in seen):
        yield not_applicable("CUDA-aware MPI", "not applicable: no rank has a GPU")
        return
    claims, claim = words(m.cuda), claimed(m.cuda)
    staged = "chunks for other nodes are staged in pinned host memory"
    if test is None or not test.ran:
        why = f" (self-test not run: {test.words})" if test else ""
        yield Finding("CUDA-aware MPI", "ok" if claim else "n/a", f"{claims}{why}" + ("" if claim else f": {staged}"))
    elif test.right and claim:
        yield ok("CUDA-aware MPI", f"a child job sent GPU memory correctly ({claims})")
    elif test.right:
        evidence = f"a child job sent GPU memory correctly, though nothing here says so ({claims})"
        yield ok("CUDA-aware MPI", evidence, f"{OWN}=1 lets it carry chunks between nodes from GPU memory")
    elif claim:
        claimants = f"{OWN}, MPICH_GPU_SUPPORT_ENABLED, MV2_USE_CUDA"
        remedy = f"remove the claim ({claimants}), or install MPI with its CUDA parts"
        yield fail("CUDA-aware MPI", f"{claims}, but the child job ended with {test.words}", remedy)
    else:
        yield not_applicable("CUDA-aware MPI", f"no ({claims}; the child job ended with {test.words}): {staged}")


GPU_CHECKS = (_gpus, _binding, _mig, _nvlinks, _fabric, _confidential, _pcie, _pairs, _cuda_versions)
