"""The kernels' sources, and :mod:`.compiler`, which makes machine code of them."""
