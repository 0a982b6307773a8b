"""Several boxes on a network (Blink section 3.5).

Method ``cluster``, spanning trees over the whole cluster: ``between_boxes`` divides the vector into commodities,
``rails`` does so where ports lead to networks of their own, ``inside_boxes`` packs the trees of each box, ``assembly``
joins them to spanning trees.

Method ``tiers``, for many ranks on leaves, spines and what is above them: ``fan_out`` makes trees of boxes over the
groups of each tier, ``ports`` and ``routes`` say where every copy leaves, enters and runs, ``hierarchy`` makes trees of
ranks of all that.

Blink's three phases (reduce in each box, exchange between boxes, broadcast in each) run at once on the way up and down
these trees.
"""
