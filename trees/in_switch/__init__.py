"""AllReduce with sums in the switches (SHARP): trees whose inner vertices may be switches that reduce and multicast.

``joined``   the ranks and the switches that fold and copy, and the cheapest trees that join all ranks
``packing``  the entry point: a linear program over such trees, and the bounds of AllReduce with these switches
``verify``   proves such a packing, and its bound

A plan of a job never holds these packings: nothing here drives switches. They are planned, lowered and simulated.
"""
