"""The facts about one GPU as a value: each a fact, or the reason why it is not known, never a zero instead.

:func:`facts_of` converts a report (the raw answers of NVML and /sys, as JSON) to :class:`GpuFacts`. Reports come from
``probe``, or from a file that was recorded on another machine. Pure data: nothing here asks the system.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from ..errors import FormatError
from ..util.codec import Document, Value
from ..util.text import quoted

FORMAT_VERSION = 1
ABSENT = "not in the report"
Report = Mapping[str, Any]
T = TypeVar("T")

# NVML's numbers, from nvml.h of driver 580.
VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0"}  # nvmlNvlinkVersion_t
ACTIVE = {0: False, 1: True, 2: True, 3: False}  # 2: asleep to save power; 3: up, but traffic is disabled
REMOTES = {0: "gpu", 1: "npu", 2: "switch"}  # nvmlIntNvLinkDeviceType_t; 255: unknown
FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}  # nvmlGpuFabricState_t
P2P = {0: "ok", 1: "chipset not supported", 2: "GPU not supported", 3: "IOH topology not supported",
       4: "disabled by a registry key", 5: "not supported"}  # nvmlGpuP2PStatus_t; 6: unknown  # fmt: skip
ANCESTORS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # as nvidia-smi topo -m says it


class Unknown(Value, frozen=True):
    """Why a fact is not known."""

    reason: str


class NvLink(Value, frozen=True):
    """One NVLink port; ``bus`` is the other end's PCI id, where the system shows it."""

    number: int
    active: bool | Unknown
    version: str | Unknown
    remote: Literal["gpu", "npu", "switch", "hidden switch"] | Unknown
    bus: str = ""


class XgmiLinks(Value, frozen=True):
    """So many xGMI links to the GPU at ``bus``; ``architecture`` is the GPU's own, as in ``gfx942``."""

    bus: str
    count: int
    architecture: str | Unknown


class PcieBridge(Value, frozen=True):
    """A PCIe bridge between the CPU and a device, with the link towards the CPU."""

    bus: str
    gen: int | Unknown
    width: int | Unknown


class Nic(Value, frozen=True):
    """A network card; ``path`` are the bridges above it, ``distance`` is to the GPU, as nvidia-smi says it."""

    name: str
    distance: Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
    path: tuple[str, ...]
    mbps: int | Unknown


class PeerAccess(Value, frozen=True):
    """Peer access to another GPU that NVML sees: ``ok`` or why not, and where their PCIe paths meet."""

    bus: str
    nvlink: str | Unknown
    read: str | Unknown
    ancestor: str | Unknown


class GpuFacts(Document, frozen=True):
    """One GPU. ``index`` is NVML's, which is not CUDA's: join by ``uuid`` or ``bus``.

    ``pcie_gen`` is the best that GPU and slot can do together (an idle link goes down to 1), ``pcie_width`` what the
    slot gives now, ``pcie_width_max`` what it could. ``path`` leads from the CPU's root port to the last bridge above
    the GPU; it is empty where the GPU hangs on the root bus, as in virtual machines. ``c2c`` are the NVLinks to the
    GPU's own CPU, and the MB/s of each.
    """

    KIND: ClassVar = "gpu"
    VERSION: ClassVar = FORMAT_VERSION
    bus: str | Unknown
    uuid: str | Unknown
    name: str | Unknown
    index: int | Unknown
    driver: str | Unknown
    cuda: int | Unknown
    capability: tuple[int, int] | Unknown
    pcie_gen: int | Unknown
    pcie_width: int | Unknown
    pcie_width_max: int | Unknown
    path: tuple[PcieBridge, ...] | Unknown
    numa: int | Unknown
    nics: tuple[Nic, ...] | Unknown
    mig: bool | Unknown
    confidential: bool | Unknown
    fabric: str | Unknown
    nvlinks: tuple[NvLink, ...] | Unknown
    peers: tuple[PeerAccess, ...] | Unknown
    xgmi: tuple[XgmiLinks, ...] | Unknown = ()
    c2c: tuple[int, int] | Unknown = Unknown("nobody was asked")

    @property
    def label(self) -> str:
        """A readable name: ``NVIDIA H200 at 0000:3d:00.0``."""
        where = self.bus if isinstance(self.bus, str) else self.uuid if isinstance(self.uuid, str) else "unknown place"
        return f"{self.name if isinstance(self.name, str) else 'GPU'} at {where}"


def known(fact: T | Unknown) -> T | None:
    """The fact, or None for an :class:`Unknown`."""
    return None if isinstance(fact, Unknown) else fact


def bus_id(text: str) -> str:
    """Convert a PCI bus id to the form that Linux uses, ``0000:3d:00.0``: NVML writes 8 digits, CUDA capitals.

    Raises:
        FormatError: for anything else.
    """
    found = re.fullmatch(r"\s*(?:([0-9a-fA-F]{1,8}):)?([0-9a-fA-F]{1,2}):([0-9a-fA-F]{1,2})(?:\.([0-7]))?\s*", text)
    if found is None:
        raise FormatError(f"{quoted(text)} is no PCI bus id; expected one such as 0000:3d:00.0")
    domain, bus, device = (int(part or "0", 16) for part in found.groups()[:3])
    return f"{domain:04x}:{bus:02x}:{device:02x}.{found[4] or 0}"


def facts_of(report: Report) -> GpuFacts:
    """Read one device's report.

    Args:
        report: the layout that ``probe.Nvml`` writes. An answer that NVML refused stands there as ``nvml_error`` with
            the error's name and text; ``sys`` holds what /sys says.
    """
    lost = report.get("nvml_error")
    nvml: Report = {} if lost else report
    missing = str(lost or ABSENT)

    def get(*path: str | int, of: Report = nvml, absent: str = missing) -> Any:
        return _answer(of, path, absent)

    sys: Report = report.get("sys", {})
    no_sys = str(sys.get("error", ABSENT))
    # NVML names the bus first; without NVML it is what the caller asked for.
    bus = get("pci", "busId")
    asked = report.get("bus")
    return GpuFacts(
        bus=asked if isinstance(bus, Unknown) and asked else _of(bus, bus_id),
        uuid=report["uuid"] if isinstance(report.get("uuid"), str) else get("uuid"),
        name=get("name"),
        index=get("index"),
        driver=get("driver"),
        cuda=get("cuda"),
        capability=_of(get("cc"), lambda c: (int(c[0]), int(c[1]))),
        pcie_gen=_either(get("pcie", "gen_max"), get("gen", of=sys, absent=no_sys)),
        pcie_width=_either(get("pcie", "width"), get("width", of=sys, absent=no_sys)),
        pcie_width_max=_either(get("pcie", "width_max"), get("width_max", of=sys, absent=no_sys)),
        path=_of(get("path", of=sys, absent=no_sys), lambda hops: tuple(map(_bridge, hops))),
        numa=_of(get("numa", of=sys, absent=no_sys), _numa),
        nics=_of(get("nics", of=sys, absent=no_sys), lambda cards: tuple(map(_nic, cards))),
        mig=_of(get("mig", 0), bool),
        confidential=_of(get("confidential", "ccFeature"), bool),
        fabric=_word(get("fabric", "state"), FABRIC, "fabric state"),
        nvlinks=_of(get("nvlinks"), _nvlinks),
        peers=_of(get("p2p"), lambda p2p: _peers(p2p, get("common_ancestor"))),
    )


def _answer(of: Any, path: tuple[str | int, ...], absent: str) -> Any:
    """Follow ``path`` into nested answers; Unknown where something on the way is missing or an error."""
    at = of
    for key in path:
        if isinstance(at, Mapping) and "nvml_error" in at:
            return Unknown(str(at["nvml_error"]))
        if isinstance(at, Mapping):
            if key not in at:
                return Unknown(absent)
            at = at[str(key)]
        else:
            at = at[key]
    if isinstance(at, Mapping) and ("nvml_error" in at or "error" in at):
        return Unknown(str(at.get("nvml_error", at.get("error"))))
    return at


def _of(answer: Any, read: Callable[[Any], T]) -> T | Unknown:
    """What is read from an answer, if there is one."""
    return answer if isinstance(answer, Unknown) else read(answer)


def _positive(answer: Any) -> int | Unknown:
    """Virtual machines answer 0 for what they hide."""
    return _of(answer, lambda n: int(n) if n > 0 else Unknown(f"the system says {n}"))


def _either(nvml: Any, sys: Any) -> int | Unknown:
    """NVML's answer, or that of /sys, or both reasons."""
    found = [_positive(nvml), _positive(sys)]
    reasons = dict.fromkeys(f.reason for f in found if isinstance(f, Unknown))
    return next((f for f in found if isinstance(f, int)), Unknown("; ".join(reasons)))


def _numa(node: int) -> int | Unknown:
    return node if node >= 0 else Unknown("the system names no NUMA node (-1)")


def _word(answer: Any, words: Mapping[int, str], what: str) -> str | Unknown:
    return _of(answer, lambda number: words.get(number) or Unknown(f"NVML says {what} {number}"))


def _bridge(hop: Report) -> PcieBridge:
    gen, width = (_positive(_answer(hop, (name,), "not there")) for name in ("gen", "width"))
    return PcieBridge(hop["bus"], gen, width)


def _nic(card: Report) -> Nic:
    return Nic(card["name"], card["distance"], tuple(card["path"]), _positive(_answer(card, ("mbps",), "no rate")))


def _nvlinks(answer: Sequence[Report]) -> tuple[NvLink, ...] | Unknown:
    """The ports that exist: NVML refuses numbers past the last one, and all of them on a GPU without NVLink."""
    found: list[NvLink] = []
    for link in answer:
        state = _answer(link, ("state",), ABSENT)
        if isinstance(state, Unknown):
            if state.reason.startswith(("NVMLError_InvalidArgument", "NVMLError_NotSupported")):
                continue  # no such port
            if not found:
                return state
        number = int(link["link"])
        active = state if isinstance(state, Unknown) else ACTIVE.get(state, Unknown(f"NVML says state {state}"))
        version = _word(_answer(link, ("version",), ABSENT), VERSIONS, "NVLink version")
        found.append(NvLink(number, active, version, *_remote(link)))
    return tuple(found)


def _remote(link: Report) -> tuple[Any, str]:
    """The kind of the other end, and its PCI id if that is one.

    Virtual machines hide the switches: their PCI id reads all ones or all zeros, or is refused. An NVLink whose other
    end nobody names leads to a switch then.
    """
    kind = _answer(link, ("remote_type",), ABSENT)
    pci = _answer(link, ("remote_pci", "busId"), ABSENT)
    digits = "" if isinstance(pci, Unknown) else pci.rpartition(".")[0].replace(":", "").lower()
    bus = "" if set(digits) in (set(), {"0"}, {"f"}) else bus_id(pci)
    word = REMOTES.get(kind) if not isinstance(kind, Unknown) else None
    if bus:
        return word or Unknown(f"NVML does not say what is at {bus}"), bus
    if word in ("gpu", "npu"):
        return Unknown(f"NVML says {word} and no PCI id"), ""
    return "hidden switch", ""


def _peers(p2p: Mapping[str, Any], ancestors: Any) -> tuple[PeerAccess, ...]:
    """Peer access by PCI id; a report without the other GPUs' PCI ids (an older recording) has none."""
    found: list[PeerAccess] = []
    for key, status in p2p.items():
        nvlink, read = (_word(_answer(status, (of,), ABSENT), P2P, "P2P status") for of in ("nvlink", "read"))
        ancestor = ancestors if isinstance(ancestors, Unknown) else _answer(ancestors, (key,), ABSENT)
        found.append(PeerAccess(key, nvlink, read, _word(ancestor, ANCESTORS, "ancestor")))
    return tuple(found)


def device_of(recording: Report, bus: str | None, uuid: str | None) -> dict[str, Any]:
    """One device's report from a recording of a whole machine: ``driver``, ``cuda`` and ``devices``.

    Peers, which a recording numbers, get their PCI ids. A missing device gets the reason, as in ``probe``.
    """
    common = {key: recording[key] for key in ("driver", "cuda", "nvml_error") if key in recording}
    devices: list[dict[str, Any]] = recording.get("devices", [])
    asked = {"bus": bus_id(bus)} if bus else {}
    ids = {str(d["index"]): bus_id(d["pci"]["busId"]) for d in devices if "pci" in d}
    for device in devices:
        if (bus and ids.get(str(device["index"])) == bus_id(bus)) or (uuid and device.get("uuid") == uuid):
            named = {
                key: {ids.get(i, i): answer for i, answer in device[key].items()}
                for key in ("p2p", "common_ancestor")
                if isinstance(device.get(key), dict) and "nvml_error" not in device[key]
            }
            return {**common, **device, **named, **asked}
    lost = msgspec.json.encode([bus, uuid]).decode()
    return {"nvml_error": f"NVMLError_NotFound: {lost} is not in the recording", **common, **asked,
            **({"uuid": uuid} if uuid else {})}  # fmt: skip


def unknown_gpu(reason: str, **facts: Any) -> GpuFacts:
    """A GPU with some known facts; for all others the reason why they are unknown."""
    return GpuFacts(**{name: facts.get(name, Unknown(reason)) for name in GpuFacts.__struct_fields__})
