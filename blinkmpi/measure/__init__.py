"""Measurements of the machine: rates of its links, tuned selection tables, costs of steps.

``links`` measures rates and ``show`` prints them, ``tune`` measures candidates of the selection table on GPUs, and
``steps`` what the steps of calls cost on CPU ranks.
"""
