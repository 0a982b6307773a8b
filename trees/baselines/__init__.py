"""What the automatic choice never takes: Blink's own stages (section 3), and what it is compared with.

``mwu``     method ``mwu``: packing by multiplicative weights, Blink's first stage
``ilp``     method ``mwu+ilp``: fewer trees by integer programming, its second stage
``few``     method ``few``: limits on number and depth of trees
``rings``   method ``rings``: what NCCL builds
"""
