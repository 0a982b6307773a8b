"""A start costs little: what a rank and a command load, counted in modules, which no busy machine changes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest

from blinkmpi import cli
from blinkmpi.cli.main import COMMANDS
from tests.harness import ROOT, run_command
from tests.tree import PACKAGE, sources

PACKAGES = ("blinkmpi", "blinkmpi.lang", "blinkmpi.topology", "blinkmpi.torch", "blinkmpi.trees")  # that offer names
OTHERS = ("scipy", "networkx", "rich", "xml", "urllib.request", "http", "concurrent", "logging", "torch", "cupy",
          "pynvml", "matplotlib")  # fmt: skip
RANK_0 = ("blinkmpi.planning.default_tables", "blinkmpi.planning.defaults", "blinkmpi.planning.planner",
          "blinkmpi.trees.packing")  # fmt: skip
NO_RANK = (
    "blinkmpi.bench", "blinkmpi.cli", "blinkmpi.doctor", "blinkmpi.forecast", "blinkmpi.lang.library",
    "blinkmpi.lang.trace", "blinkmpi.lang.xml", "blinkmpi.measure", "blinkmpi.planning.diff",
    "blinkmpi.planning.explain", "blinkmpi.planning.gpus", "blinkmpi.planning.predictor",
    "blinkmpi.planning.subsets", "blinkmpi.plot", "blinkmpi.program.cost_model",
    "blinkmpi.runtime.cuda.call", "blinkmpi.runtime.cuda.context", "blinkmpi.runtime.inspection",
    "blinkmpi.runtime.shrinking",
    "blinkmpi.topology.importers", "blinkmpi.topology.probe", "blinkmpi.torch", "blinkmpi.transport.cuda.transport",
    "blinkmpi.trees.baselines", "blinkmpi.trees.cluster", "blinkmpi.trees.exact", "blinkmpi.trees.on_links",
)  # fmt: skip
OURS, MOST = (138, 128), (218, 207)  # modules of blinkmpi, and of all: of rank 0, of others. A few more than now.
OPENED = """
import json, sys
import mpi4py, numpy
from mpi4py import MPI
before = set(sys.modules)
import blinkmpi
comm = blinkmpi.Communicator(MPI.COMM_WORLD)
with open(f"{sys.argv[1]}/{comm.rank}", "w") as file:
    json.dump(sorted(set(sys.modules) - before), file)
comm.Free()
"""


def loaded_by(statement: str) -> set[str]:
    """The modules that a statement loads in a fresh process."""
    program = f"import sys\nstart = set(sys.modules)\n{statement}\nprint(*set(sys.modules) - start, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def below(modules: set[str], *packages: str) -> list[str]:
    """Those of some packages."""
    return sorted(m for m in modules if any(m == package or m.startswith(f"{package}.") for package in packages))


# ---------------------------------------------------------------- ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """What each of two CPU ranks loads besides mpi4py and NumPy to open a Communicator."""
    folder = tmp_path_factory.mktemp("loaded")
    argv = [sys.executable, "-c", OPENED, str(folder)]
    outcome = run_command(2, argv, timeout=60, env={"BLINKMPI_GPU_DISABLE": "1"})
    assert outcome.rc == 0, outcome.output
    return [set(json.loads((folder / str(rank)).read_text(encoding="utf-8"))) for rank in range(2)]


@pytest.mark.slow
def test_a_rank_loads_what_opening_needs(ranks: list[set[str]]) -> None:
    for modules in ranks:
        assert not below(modules, *OTHERS, *NO_RANK)
    assert not below(ranks[1], *RANK_0)
    assert below(ranks[0], *RANK_0) == sorted(RANK_0), "rank 0 plans: the names are those of modules"
    for modules, ours, most in zip(ranks, OURS, MOST, strict=True):
        assert len(below(modules, "blinkmpi")) <= ours
        assert len(modules) <= most


def test_what_no_rank_loads_is_there() -> None:
    """Else a module that was renamed would be forbidden under its old name."""
    for name in NO_RANK:
        assert find_spec(name) is not None, name


# ---------------------------------------------------------------- commands and packages


@pytest.mark.parametrize("word", ["--version", "-h"])
def test_a_word_to_the_command_loads_no_command(word: str) -> None:
    statement = f"from blinkmpi.cli.main import main\ntry: main([{word!r}])\nexcept SystemExit: pass"
    modules = loaded_by(statement)
    assert not below(modules, "numpy", "scipy", "rich", "msgspec", "mpi4py", "fractions", "networkx")
    assert below(modules, "blinkmpi.cli") == ["blinkmpi.cli", "blinkmpi.cli.main", "blinkmpi.cli.output"]
    assert len(below(modules, "blinkmpi")) <= 9
    assert len(modules) <= 90


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_no_other(command: str) -> None:
    modules = loaded_by(f"from blinkmpi.cli.main import main\ntry: main([{command!r}, '-h'])\nexcept SystemExit: pass")
    loaded = {name.removeprefix("blinkmpi.cli.") for name in below(modules, "blinkmpi.cli")}
    assert loaded & set(COMMANDS) == {command}
    assert not below(modules, "mpi4py.MPI", "scipy", "networkx", "matplotlib", "torch", "cupy", "pynvml")


def test_a_command_is_a_module() -> None:
    for name in COMMANDS:
        module = import_module(f"{cli.__name__}.{name}")
        assert callable(module.add_arguments), name
        assert callable(module.run), name


def test_importing_the_package_loads_little() -> None:
    modules = loaded_by("import blinkmpi")
    assert below(modules, "blinkmpi") == ["blinkmpi", "blinkmpi.errors", "blinkmpi.util", "blinkmpi.util.lazy"]
    assert len(modules) <= 30


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_offers_each_name_and_none_of_a_module(name: str) -> None:
    """A name that is a module's, too, would mean the one or the other, by the order of imports."""
    if name == "blinkmpi.torch":
        pytest.importorskip("torch")
    package = import_module(name)
    modules = {one.name for one in iter_modules(package.__path__)}
    for offered in package.__all__:
        value = getattr(package, offered)
        assert offered in dir(package)
        assert (offered in modules) == isinstance(value, ModuleType), f"{name}.{offered} is a module's name"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018


def test_every_package_that_offers_names_is_tried() -> None:
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in sources_with("lazily(")}
    assert {name.removeprefix("blinkmpi.") for name in PACKAGES} == {f.removeprefix("blinkmpi.") for f in found}


def sources_with(text: str) -> Iterator[Path]:
    """The packages' ``__init__.py`` with a text in them."""
    for path in sources(*PACKAGE):
        if path.name == "__init__.py" and text in (ROOT / path).read_text(encoding="utf-8"):
            yield ROOT / path
