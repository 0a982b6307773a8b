"""The paper's own planner (section 3).

``mwu``     method ``mwu``: packing by multiplicative weights, the first stage
``ilp``     method ``mwu+ilp``: fewer trees by integer programming, the second stage
``few``     method ``few``: limits on number and depth; ``pool`` finds candidates on large graphs
``pareto``  the packings between few, shallow and fast, and the choice by message size
``hybrid``  method ``hybrid``: NVLink and PCIe at once
``groups``  method ``groups``: the paper's early protocol
"""
