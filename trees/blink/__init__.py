"""The paper's own planner: multiplicative weights, fewer trees by integer programs, hybrid links (section 3.2)."""
