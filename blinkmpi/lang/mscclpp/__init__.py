"""MSCCL++'s execution plans (JSON): read, and judged by what their thread blocks do to one another's memory."""
