"""Several boxes on a network (Blink section 3.5).

Method ``cluster``, spanning trees over the whole cluster: ``boxes`` finds boxes and ports, ``between_boxes`` divides
the vector into streams, ``inside_boxes`` packs the trees of each box, ``assembly`` joins them to spanning trees.

Blink's three phases (reduce in each box, exchange between boxes, broadcast in each) run at once on the way up and down
these trees.
"""
