"""MSCCL's XML: read and written (``file``), proved (``check``), and made of a flow (``export``).

``check`` asks for the structure (``wiring``), the order of steps (``order``), and races and results (``values``);
``export`` has ``fuse`` make thread blocks.
"""
