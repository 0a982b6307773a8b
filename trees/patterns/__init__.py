"""Packings of a fixed pattern: one-hop stars, chains, NCCL's rings, one shared memory."""
