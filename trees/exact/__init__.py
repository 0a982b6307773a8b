"""Methods that meet their bound.

``edmonds``                 method ``exact``: packings of arborescences and spanning trees, and paths of a maximum flow
``arborescences``           its algorithm for up to 16 ranks (Edmonds 1973, Lovasz 1976, Frank 1978)
``arborescences_by_flow``   method ``flows``: the same for larger graphs
``symmetric``               method ``symmetric``: machines that look the same from every rank (Cayley graphs)
``templates``               its linear program, for those with switches
``column_generation``       method ``columns``: a linear program over all trees; ``rational`` makes its solution exact
``enumeration``             all spanning trees of a small graph
``weights``                 the best weights for given trees, by linear and integer programs
"""
