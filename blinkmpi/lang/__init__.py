"""Collectives that users write, as programs over chunks: written in Python or read from XML, proved, then run.

``trace``        the language: chunk(), copy, reduce
``written``      ``@algorithm``: from a function to an Algorithm; ``parameters`` of it on the command line
``source``       algorithms from files, whatever they are written in
``flow``         what an algorithm computes, by value, and its proof
``algorithms``   ``Algorithm``: the value, and what can be asked of it
``lower``        makes a Program of it; ``stages`` its channels and stages
``interpreter``  runs it on NumPy
``library``      those that have names; ``picture`` draws one
``packed``       trees of a packing as an Algorithm, and as Python text
``xml/``         MSCCL's XML: read, judged, and made of a flow
``msccl``        MSCCLang's own names, for programs of msccl-tools as they are; ``msccl_collectives`` its collectives
"""

from typing import TYPE_CHECKING

from ..util.lazy import lazily

if TYPE_CHECKING:
    from . import library
    from .algorithms import SCHEME, Algorithm
    from .flow import goal_of
    from .source import load
    from .trace import Buffer, Ref, chunk
    from .written import CustomCollective, Written, algorithm, custom
else:
    __getattr__, __dir__ = lazily(__name__, {
        "algorithms": ("SCHEME", "Algorithm"),
        "flow": ("goal_of",),
        "library": (),
        "source": ("load",),
        "trace": ("Buffer", "Ref", "chunk"),
        "written": ("CustomCollective", "Written", "algorithm", "custom"),
    })  # fmt: skip

__all__ = [
    "SCHEME", "Algorithm", "Buffer", "CustomCollective", "Ref", "Written", "algorithm", "chunk", "custom", "goal_of",
    "library", "load",
]  # fmt: skip
