"""Calls between GPUs: ``kernel_times`` has what they take, ``rules`` which protocol carries which size."""
