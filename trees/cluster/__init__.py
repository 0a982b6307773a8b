"""Several boxes on a network (Blink section 3.5).

Method ``cluster``, spanning trees over the whole cluster: ``boxes`` finds boxes and ports, ``between_boxes`` divides
the vector into streams, ``inside_boxes`` packs the trees of each box, ``assembly`` joins them to spanning trees.

The three-phase hierarchy (reduce in each box, exchange, broadcast in each box): ``hierarchy`` plans it, ``phases``
holds the result with its bound and proof, ``network_paths`` what each box can exchange with the network.
"""
