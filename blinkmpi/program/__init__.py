"""A collective call as a program of stages and channels: lowered from trees, checked, interpreted, priced. Pure."""
