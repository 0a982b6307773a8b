"""How fast any trees could be, with the proof: cuts, partitions, prices; and the check of a packing."""
