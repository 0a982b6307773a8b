"""Packings that meet their bound (Edmonds 1973, Lovasz 1976, Frank 1978)."""
