"""Sums of a chunked array by dask: a rank is its scheduler, one its client, the others work. What make clients runs."""

import dask.array as da
from dask.distributed import Client
from dask_mpi import initialize

SIDE, CHUNK = 400, 100

initialize(nthreads=1, dashboard=False)  # where the client alone comes back
with Client() as client:
    x = da.arange(SIDE * SIDE, chunks=SIDE * CHUNK).reshape(SIDE, SIDE)
    total = (x + x.T).sum().compute()
RESULT = {"sum": float(total)}
