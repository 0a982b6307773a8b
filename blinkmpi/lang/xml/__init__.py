"""MSCCL's XML: read and written (``file``), proved (``check``), and made of a flow (``export``)."""
