"""How fast any trees can be, with proof, and the check of a packing.

``certify``  the best possible rate: cuts, ratio cuts, partitions
``prices``   a bound by LP duality: prices on links, and the cheapest trees at these prices
``verify``   proves a packing, whichever method made it
"""
