"""Machines for the tests of plans: rail-optimised clusters, whose networks join GPUs of one number alone."""

from itertools import product

from blinkmpi.topology.model import Device, Link, Switch, Topology


def rails(boxes: int, each: int, *, slow: int = -1) -> Topology:
    """Boxes of ``each`` GPUs around an NVSwitch, and a switch between the boxes for each GPU of a box.

    Args:
        slow: a GPU whose network card has half the rate of the others.
    """
    n, links = boxes * each, []
    for gpu, (box, rail) in enumerate(product(range(boxes), range(each))):
        speed = 12_500 if gpu == slow else 25_000
        for src, dst in ((gpu, n + box), (n + box, gpu)):
            links.append(Link(src, dst, "nvlink", 12, 25_000))
        for src, dst in ((gpu, n + boxes + rail), (n + boxes + rail, gpu)):
            links.append(Link(src, dst, "net", 1, speed))
    devices = [Device("gpu", box, rail) for box, rail in product(range(boxes), range(each))]
    switches = [Switch("nvswitch", box) for box in range(boxes)] + [Switch("net", -1) for _ in range(each)]
    return Topology(f"rails {boxes}x{each}", tuple(devices), tuple(switches), tuple(links))
