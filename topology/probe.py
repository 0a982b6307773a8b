"""Ask the system about a GPU: NVML through nvidia-ml-py, and /sys. Only this module imports pynvml.

``probe`` gets the GPU's PCI bus id or UUID from CUDA, never a number: NVML counts all GPUs of the machine, CUDA only
those that CUDA_VISIBLE_DEVICES leaves, in its own order. The answers are one report (JSON, ``gpu.facts_of`` reads it),
so a recorded report can replace the machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import TopologyError
from ..util.text import error_text
from .gpu import GpuFacts, Report, Unknown, bus_id, device_of, facts_of

SYS = Path("/sys")
PCI_ID = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
ROOT_BUS = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
GT_PER_S = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}  # a lane's rate: the generation of PCIe
LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")


def probe(pci_bus_id: str | None, uuid: str | None = None, *, source: Nvml | Recording | None = None) -> GpuFacts:
    """The facts of one GPU.

    Args:
        pci_bus_id: as cudaDeviceGetPCIBusId gives it, ``0000:3D:00.0``.
        uuid: ``GPU-...``; one of the two is enough.
        source: instead of this machine's NVML, a :class:`Recording`.

    Raises:
        TopologyError: when neither is given. FormatError: for a text that is no PCI bus id.
        Whatever the system does not tell is a reason in the result, not an error.
    """
    if not pci_bus_id and not uuid:
        raise TopologyError("which GPU? give its PCI bus id or its UUID; a CUDA device number is not NVML's")
    return facts_of((source or Nvml()).report(bus_id(pci_bus_id) if pci_bus_id else None, uuid or None))


def probe_all(*, source: Nvml | Recording | None = None) -> tuple[GpuFacts, ...]:
    """All GPUs that NVML sees on this machine, in its order; none where there is no NVML.

    CUDA_VISIBLE_DEVICES does not count here: it is CUDA that reads it.
    """
    asked = source or Nvml()
    return tuple(facts_of(asked.report(bus, None)) for bus in asked.buses())


class Recording:
    """A machine that was recorded: the JSON of ``tests/data`` (its ``driver``, ``cuda`` and ``devices``)."""

    def __init__(self, recording: Report) -> None:
        self._recording = recording

    def report(self, bus: str | None, uuid: str | None) -> Report:
        """The recorded report."""
        return device_of(self._recording, bus, uuid)

    def buses(self) -> list[str]:
        """The recorded devices."""
        return [bus_id(d["pci"]["busId"]) for d in self._recording.get("devices", [])]


class Nvml:
    """This machine's NVML and /sys."""

    def report(self, bus: str | None, uuid: str | None) -> Report:
        """Ask everything about one GPU, at most a few milliseconds."""
        found = dict(_session(lambda nvml: _report(nvml, bus, uuid)))
        found |= {key: value for key, value in (("bus", bus), ("uuid", uuid)) if value}
        pci = found.get("pci")
        seen = bus or (bus_id(pci["busId"]) if isinstance(pci, Mapping) and "busId" in pci else None)
        found["sys"] = sys_report(seen) if seen else {"error": "the PCI bus id is not known"}
        return found

    def buses(self) -> list[str]:
        """All GPUs that NVML counts and describes."""

        def work(nvml: Any) -> Report:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return {"buses": [bus_id(_text(nvml.nvmlDeviceGetPciInfo(h).busId)) for h in handles]}

        return list(_session(work).get("buses", []))

    def users(self) -> dict[str, int | Unknown]:
        """How many processes compute on each GPU that NVML counts, by PCI id, or why that is not known; empty where
        there is no NVML.
        """

        def on(nvml: Any, handle: Any) -> int | dict[str, str]:
            try:
                return len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
            except nvml.NVMLError as error:
                return {"nvml_error": error_text(error)}

        def work(nvml: Any) -> Report:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return {bus_id(_text(nvml.nvmlDeviceGetPciInfo(h).busId)): on(nvml, h) for h in handles}

        found = _session(work)
        counts = {bus: number for bus, number in found.items() if bus != "nvml_error"}
        return {bus: Unknown(n["nvml_error"]) if isinstance(n, Mapping) else n for bus, n in counts.items()}

    def why_not(self) -> str:
        """Why NVML does not answer at all; empty if it does."""
        return str(_session(lambda nvml: {"count": nvml.nvmlDeviceGetCount()}).get("nvml_error", ""))


def _session(work: Callable[[Any], Report]) -> Report:
    """Do ``work`` between init and shutdown, or report why that is impossible."""
    try:
        import pynvml as nvml
    except ImportError as error:
        return {"nvml_error": f"NotInstalled: {error}; pip install nvidia-ml-py"}
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return {"nvml_error": error_text(error)}
    try:
        return work(nvml)
    except nvml.NVMLError as error:
        return {"nvml_error": error_text(error)}
    finally:
        nvml.nvmlShutdown()


def _report(nvml: Any, bus: str | None, uuid: str | None) -> Report:
    handle = nvml.nvmlDeviceGetHandleByPciBusId(bus) if bus else nvml.nvmlDeviceGetHandleByUUID(uuid)

    def ask(name: str, *args: Any, of: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """One question; an error is an answer too."""
        try:
            return of(getattr(nvml, name)(*args))
        except nvml.NVMLError as error:
            return {"nvml_error": error_text(error)}
        except AttributeError:
            return {"nvml_error": f"NVMLError_FunctionNotFound: {name} is not in this nvidia-ml-py"}

    def pci(info: Any) -> Report:
        return {"busId": _text(info.busId), "pciDeviceId": info.pciDeviceId}

    def fabric() -> Any:
        info = nvml.c_nvmlGpuFabricInfoV_t()
        done = ask("nvmlDeviceGetGpuFabricInfoV", handle, nvml.byref(info))
        known = {"state": info.state, "status": info.status, "cliqueId": info.cliqueId}
        return done if isinstance(done, dict) else known

    def nvlinks() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = ask("nvmlDeviceGetNvLinkState", handle, link)
            found.append({"link": link, "state": state})
            if isinstance(state, dict):
                break  # past the last one: InvalidArgument; no NVLink at all: NotSupported
            found[-1] |= {
                "version": ask("nvmlDeviceGetNvLinkVersion", handle, link),
                "remote_type": ask("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link),
                "remote_pci": ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link, of=pci),
            }
        return found

    p2p, ancestors = {}, {}
    for i in range(nvml.nvmlDeviceGetCount()):
        other = ask("nvmlDeviceGetHandleByIndex", i)
        where = other if isinstance(other, dict) else ask("nvmlDeviceGetPciInfo", other, of=pci)
        own = ask("nvmlDeviceGetIndex", handle)
        if "busId" not in where or i == own:
            continue
        key = bus_id(where["busId"])
        # In nvidia-ml-py 13.615 NVML_P2P_CAPS_INDEX_READ is the tuple (0,), which the function refuses.
        p2p[key] = {
            "read": ask("nvmlDeviceGetP2PStatus", handle, other, 0),
            "nvlink": ask("nvmlDeviceGetP2PStatus", handle, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK),
        }
        ancestors[key] = ask("nvmlDeviceGetTopologyCommonAncestor", handle, other)
    return {
        "driver": ask("nvmlSystemGetDriverVersion", of=_text),
        "cuda": ask("nvmlSystemGetCudaDriverVersion_v2"),
        "index": ask("nvmlDeviceGetIndex", handle),
        "name": ask("nvmlDeviceGetName", handle, of=_text),
        "uuid": ask("nvmlDeviceGetUUID", handle, of=_text),
        "pci": ask("nvmlDeviceGetPciInfo", handle, of=pci),
        "cc": ask("nvmlDeviceGetCudaComputeCapability", handle, of=list),
        "pcie": {
            "gen": ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            "gen_max": ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            "width": ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            "width_max": ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        },
        "mig": ask("nvmlDeviceGetMigMode", handle, of=list),
        "confidential": ask("nvmlSystemGetConfComputeState", of=lambda s: {"ccFeature": s.ccFeature}),
        "fabric": fabric(),
        "nvlinks": nvlinks(),
        "p2p": p2p,
        "common_ancestor": ancestors,
    }


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def sys_report(bus: str, root: Path = SYS) -> Report:
    """What Linux says about the path from a PCI device to the CPU, and about the network cards near it."""
    device = root / "bus/pci/devices" / bus
    try:
        above = _above(device.resolve(strict=True))
    except OSError as error:
        return {"error": f"{device}: {error.strerror}"}
    numa = _read(device / "numa_node", int)
    links = [{"bus": hop, **_link(root / "bus/pci/devices" / hop)} for hop in above[1:]]
    width_max = _read(device / "max_link_width", int)
    return {"path": links, **_link(device), "width_max": width_max, "numa": numa, "nics": _near(above, numa, root)}


def _above(place: Path) -> list[str]:
    """The root bus (``pci0000:3a``) and bridges above a device, from its path under /sys/devices."""
    ids = [part for part in place.parts if ROOT_BUS.fullmatch(part) or PCI_ID.fullmatch(part)]
    return ids[:-1]


def _link(device: Path) -> Report:
    """Generation and width of the link above a device; the best generation, since an idle link goes down."""
    speed = _read(device / "max_link_speed", lambda text: GT_PER_S[float(text.split()[0])])
    return {"gen": speed, "width": _read(device / "current_link_width", int)}


def _near(above: list[str], numa: Any, root: Path) -> list[Report]:
    """The network cards at the least distance: InfiniBand's, and Ethernet's on PCI."""
    found: dict[Path, dict[str, Any]] = {}
    for folder in ("class/infiniband", "class/net"):
        for card in sorted((root / folder).iterdir() if (root / folder).is_dir() else ()):
            if not (card / "device").exists():
                continue  # loopback, bridges and other virtual interfaces
            place = (card / "device").resolve()
            place = next((p for p in (place, *place.parents) if PCI_ID.fullmatch(p.name)), place)
            theirs = _above(place)
            if theirs and place not in found:  # an InfiniBand card has a network name too
                distance = _distance(above, theirs, numa, _read(place / "numa_node", int))
                found[place] = {"name": card.name, "path": theirs[1:], "distance": distance, "mbps": _rate(card)}
    best = min((LEVELS.index(nic["distance"]) for nic in found.values()), default=0)
    return [nic for nic in found.values() if LEVELS.index(nic["distance"]) == best]


def _distance(a: list[str], b: list[str], numa_a: Any, numa_b: Any) -> str:
    """Where two paths meet, in the words of ``nvidia-smi topo -m``."""
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if shared > 2:  # root bus, root port, then a switch: its port up is one bridge, each of its ports down another
        return "PIX" if max(len(a), len(b)) - shared <= 1 else "PXB"
    if shared:
        return "PHB"
    return "NODE" if isinstance(numa_a, int) and numa_a == numa_b >= 0 else "SYS"


def _rate(card: Path) -> Any:
    """MB/s of a network card: InfiniBand writes ``100 Gb/sec (4X EDR)``, Ethernet Mb/s."""
    if card.parent.name == "infiniband":
        return _read(card / "ports/1/rate", lambda text: round(float(text.split()[0]) * 125))
    return _read(card / "speed", lambda text: int(text) // 8)


def _read(path: Path, of: Callable[[str], Any]) -> Any:
    """A file of /sys, or the reason why it says nothing."""
    try:
        return of(path.read_text(encoding="ascii").strip())
    except OSError as error:
        return {"error": f"{path}: {error.strerror}"}
    except (ValueError, KeyError, IndexError) as error:
        return {"error": f"{path}: cannot read it ({error})"}
