"""Bytes that somebody else may have written are never taken for code: read from the source of the package.

Another rank, another user with access to a key-value store, or a file: pickle and its like run what they read.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.project.test_arrows import parsed

MODULES = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "yaml", "runpy",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile"}
LOADERS = {"torch.load": "weights_only", "numpy.load": "", "np.load": ""}  # what makes them harmless must be said
PICKLING = {  # mpi4py's methods for Python objects
    "allgather", "allreduce", "alltoall", "bcast", "bsend", "exscan", "gather", "ibsend", "improbe", "irecv", "isend",
    "issend", "mprobe", "neighbor_allgather", "neighbor_alltoall", "recv", "reduce", "scan", "scatter", "send",
    "sendrecv", "ssend",
}  # fmt: skip
COMMUNICATORS = {  # names that one has in the package
    "COMM_SELF", "COMM_WORLD", "comm", "members", "node", "node_comm", "ours", "private", "public", "ranks", "together",
    "world",
}  # fmt: skip
EXCEPTIONS = {  # (file, what): why
    ("blinkmpi/runtime/guard.py", "exec"): "the text is made there, of names of mpi4py's methods",
    ("blinkmpi/lang/source.py", "runpy"): "a program in the language, which the user names",
    ("blinkmpi/bench/peers.py", "comm.reduce"): "NCCL's, of GPU memory",
    ("blinkmpi/bench/peers.py", "comm.send"): "the same",
    ("blinkmpi/bench/peers.py", "comm.recv"): "the same",
}


def found(tree: ast.AST) -> Iterator[str]:
    """Give what a module does that could run what it reads: imports, calls and attributes by name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), level=0) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield name
            case ast.Call(func=ast.Attribute() as function):
                said = ast.unparse(function)
                if said in LOADERS and not _harmless(node, LOADERS[said]):
                    yield said
            case ast.Attribute(attr=name, ctx=ast.Load()) if name == "pickle" or (
                name in PICKLING and _last(node.value) in COMMUNICATORS
            ):
                yield ast.unparse(node)
            case _:
                pass


def _harmless(call: ast.Call, keyword: str) -> bool:
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    return given.get(keyword) == "True" if keyword else given.get("allow_pickle", "False") == "False"


def _last(owner: ast.expr) -> str:
    """Give the last name of ``a.b._c``, without the underscore."""
    return ast.unparse(owner).rpartition(".")[2].lstrip("_")


FOUND = sorted({(str(path), what) for path, tree in parsed().items() for what in found(tree)})


def test_nothing_that_is_read_is_run() -> None:
    assert [one for one in FOUND if one not in EXCEPTIONS] == []


def test_exceptions_are_needed() -> None:
    assert [one for one in EXCEPTIONS if one not in FOUND] == []


@pytest.mark.parametrize("text", [
    "import pickle", "from pickle import loads", "import marshal", "import dill.source", "eval(body)", "exec(body)",
    "MPI.pickle.loads(body)", "torch.load(path)", "torch.load(path, weights_only=False)", "import shelve",
    "np.load(path, allow_pickle=True)", "world.bcast(x, 0)", "comm.allgather(x)", "MPI.COMM_WORLD.send(x, 1)",
    "self.comm.recv()", "do = world.allreduce",
])  # fmt: skip
def test_what_would_run_foreign_bytes_is_seen(text: str) -> None:
    assert list(found(ast.parse(text)))


@pytest.mark.parametrize("text", [
    "np.load(path)", "torch.load(path, weights_only=True)", "msgspec.json.decode(text)", "allgather(comm, 1, int)",
    "comm.Allgather(a, b)", "np.minimum.reduce(x)", "socket.recv(9)",
])  # fmt: skip
def test_what_reads_data_alone_is_not(text: str) -> None:
    assert not list(found(ast.parse(text)))


def test_all_of_the_package_is_read() -> None:
    assert {path.parts[0] for path in parsed()} >= {"blinkmpi", "topology", "trees", "launch"}
    assert Path("blinkmpi/transport/network/store.py") in parsed()
