"""Collectives that users write, as programs over chunks: written in Python or read from XML, proved, then run."""
