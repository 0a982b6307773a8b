"""Calls through slots by templates: one table on the device serves all counts of about one size."""

from collections.abc import Callable

from ...errors import PlanError
from ...lang.algorithms import SCHEME
from ...planning.on_demand import PlanOnDemand
from ...planning.plan import Rule, chunk_for
from ...program.call import Call
from ...program.ir import Program
from ...program.template import Sizes, Template
from ...transport.announcement import Called
from ...transport.cuda.loaded_kernel import LoadedKernel, LoadedTemplate
from ...transport.cuda.transport import CudaTransport
from ...trees.tree import Packing
from ...util.lru import LRU

TEMPLATES = 128  # tables that are kept
Key = tuple[str, str, int, str, str, int, int]  # scheme, collective, root, dtype, op, chunk, depth


class Templates:
    """The templates of a plan on a node whose links are real.

    Args:
        on_host: whether a program by a rule has channels that take the host path, which templates do not.
        say: logs what a function gives, once.
    """

    def __init__(
        self,
        transport: CudaTransport,
        plans: PlanOnDemand,
        on_host: Callable[[Program, Rule], bool],
        say: Callable[[Callable[[], str], str], None],
    ) -> None:
        self._transport, self._plans, self._on_host, self._say = transport, plans, on_host, say
        self._packings: dict[tuple[str, str, int], Packing] = {}
        self._templates: LRU[Key, Template | str] = LRU(TEMPLATES)
        self._loaded: LRU[tuple[Key, Sizes, int], LoadedTemplate | str] = LRU(TEMPLATES)

    def load(self, call: Call, rule: Rule, called: Called) -> LoadedKernel | None:
        """The kernel of a call; None if it has to be loaded for itself, because there is no template or no room."""
        if rule.scheme.startswith(SCHEME):
            self._each_count(call, rule, "consecutive chunks of an algorithm are joined by their lengths")
            return None
        key, packing = self._key(call, rule)
        sizes = Sizes.of(call)
        whole_key = key, sizes, rule.ctas
        found = self._loaded.find(whole_key)
        if found is None:
            template = self._template(key, packing, call, rule)
            if isinstance(template, Template):
                found = self._transport.load_template(template, sizes, rule.ctas)
            else:
                found = template
            self._loaded.put(whole_key, found)
        if isinstance(found, LoadedTemplate):
            return self._transport.load_sized(found, call, called)
        self._each_count(call, rule, found)
        return None

    def _each_count(self, call: Call, rule: Rule, why: str) -> None:
        text = f"{call.collective} by {rule.scheme}: every new count makes a table of its own: {why}"
        self._say(lambda: text, "INFO")

    def of(self, call: Call, rule: Rule) -> Template | None:
        """The template of a call, which there may be no room for on the GPU; None if it has none."""
        if rule.scheme.startswith(SCHEME):
            return None
        key, packing = self._key(call, rule)
        found = self._template(key, packing, call, rule)
        return found if isinstance(found, Template) else None

    def _key(self, call: Call, rule: Rule) -> tuple[Key, Packing]:
        which = rule.scheme, call.collective, call.root
        packing = self._packings.get(which)
        if packing is None:
            packing = self._packings[which] = self._plans.plan.packing(call.collective, call.root, rule.scheme)
        return (*which, call.dtype, call.op, chunk_for(packing, call, rule), rule.depth), packing

    def _template(self, key: Key, packing: Packing, call: Call, rule: Rule) -> Template | str:
        found = self._templates.find(key)
        if found is None:
            try:
                wire = self._plans.plan.wire
                found = Template(packing, call, chunk_bytes=key[-2], depth=key[-1], wire=wire)
                if self._on_host(found.program, rule):
                    found = "some channels take the host path"
            except PlanError as error:  # on every rank
                found = str(error)
            self._templates.put(key, found)
        return found
