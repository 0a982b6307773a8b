"""Measurements of the machine: the rates of its links (``links``, ``show``), and tuned selection tables (``tune``)."""
