"""The graph that trees are packed into.

``fabric``        the machine's links of some kinds as a capacitated graph of ranks and switches
``logical``       the graph between ranks alone, switches split away; places its trees on physical paths
``boxes``         which ranks share a box, and its ports to the network; ``tiers``: the groups of boxes below each tier
``arborescence``  the cheapest spanning arborescence at given costs
``shallow_arborescence``  the cheapest ones of at most so many hops, on small graphs
``cuts``          minimum cuts and partitions of small graphs, over all subsets of vertices at once
``cuts_by_flow``  the same for larger graphs, by maximum flows
``automorphism``  automorphisms of machines: boxes and the ranks in them counted on
``symmetry``      symmetries that move rank 0 onto others, and the orbits of links under them
``max_flow``      maximum flow in exact integers
``loads``         what the trees of a packing put on links, or on cores that share a memory
``edge_table``    the edges of many trees as arrays
"""
