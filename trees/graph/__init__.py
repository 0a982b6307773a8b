"""The graph that trees are packed into: fabric, flows, cuts, and what trees put on links."""
