"""Measurements of the machine: the rates of its links, and tuned selection tables."""
