"""Methods that meet their bound.

``edmonds``                 method ``exact``: packings of arborescences and spanning trees, and paths of a maximum flow
``arborescences``           its algorithm for up to 16 ranks (Edmonds 1973, Lovasz 1976, Frank 1978)
``arborescences_by_flow``   method ``flows``: the same for larger graphs
``symmetric``               method ``symmetric``: machines that look the same from every rank (Cayley graphs)
``templates``               its linear program, for those with switches
``column_generation``       methods ``columns`` and ``pairs``: a linear program over all trees, or over pairs of them
``all_pairs``               method ``paths``: a linear program over paths between all ranks
``orientation``             links divided between their directions, for AllReduce by ``flows``
``basis``                   from a solver's floats to the exact corner and prices; ``rational`` solves its equations
``enumeration``             all spanning trees of a small graph
``weights``                 the best weights for given trees, by linear and integer programs
"""
