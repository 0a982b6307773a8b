"""The ``mpi`` decorator: a function of a communicator becomes one test for each number of ranks."""

import faulthandler
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from unittest import mock

import pytest

from tests.harness.jobs import GRACE_S
from tests.harness.long import sizes
from tests.harness.ranks import START_S, run_ranks

STDERR = pytest.StashKey[int]()  # the descriptor of the real stderr, kept by conftest.py


def mpi(
    ranks: Sequence[int] = (2,),
    *,
    long: Sequence[int] = (),
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    own_job: bool = False,
) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """Turn a function of a communicator into one test for each number of ranks; those of ``long`` are long tests.

    Further parameters of the function are fixtures or parametrised as usual;
    their values are made in the outer process and must pickle. A test passes
    when all ranks return, is skipped when all ranks skip, and fails otherwise.

    The ranks are those of the tests before (:class:`Pools`). ``own_job`` is for a function that ends a process, or
    whose subject is what happens once in the life of one.
    """

    def decorate(body: Callable[..., object]) -> Callable[..., None]:
        def item(nranks: int, request: pytest.FixtureRequest, **params: object) -> None:
            if inline(request.config):
                if own_job:
                    pytest.skip("needs a job of its own")
                _run_here(body, nranks, request, params, timeout=timeout, env=env)
                return
            run = run_ranks if own_job else request.getfixturevalue("pools").run
            report = run(nranks, body, timeout, env=env, kwargs=params)
            if report.skipped is not None:
                pytest.skip(report.skipped)
            if report.problem is not None:
                pytest.fail(report.problem, pytrace=False)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [inspect.Parameter(name, keyword) for name in ("nranks", "request")]
        rest = [p.replace(kind=keyword) for p in list(inspect.signature(body).parameters.values())[1:]]
        item.__signature__ = inspect.Signature([*own, *rest])  # type: ignore[attr-defined]
        item.__name__, item.__qualname__, item.__doc__ = body.__name__, body.__qualname__, body.__doc__
        item.__module__ = body.__module__
        item.body = body  # type: ignore[attr-defined]
        item.pytestmark = [  # type: ignore[attr-defined]
            *getattr(body, "pytestmark", []),
            pytest.mark.parametrize("nranks", sizes(ranks, long, "np")).mark,
            pytest.mark.mpi.mark,
            pytest.mark.timeout(START_S + timeout + 6 * GRACE_S).mark,
        ]
        return item

    return decorate


# ---------------------------------------------------------------- in place, under somebody's mpirun


def inline(config: pytest.Config) -> bool:
    """Tell whether pytest itself runs on the ranks (pytest-mpi's option)."""
    return bool(config.getoption("--with-mpi", default=False))


def _run_here(
    body: Callable[..., object],
    nranks: int,
    request: pytest.FixtureRequest,
    params: Mapping[str, object],
    *,
    timeout: float,
    env: Mapping[str, str | None] | None,
) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size != nranks:
        pytest.skip(f"needs mpirun -np {nranks}, runs on {world.size}")
    stderr = request.config.stash[STDERR]
    faulthandler.dump_traceback_later(timeout, exit=True, file=stderr)
    variables = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
    try:
        world.Barrier()
        comm = world.Dup()
        with mock.patch.dict(os.environ, variables, clear=True):
            body(comm, **params)
        comm.Free()
    except pytest.skip.Exception:
        raise
    except BaseException:
        if world.size == 1:
            raise
        text = f"\nrank {world.rank} of {world.size}: {request.node.nodeid} failed\n{traceback.format_exc()}"
        os.write(stderr, text.encode())
        sys.stdout.flush()
        time.sleep(0.3)  # for ranks that fail at the same moment to say so
        world.Abort(1)
    finally:
        faulthandler.cancel_dump_traceback_later()
