"""The launch_t of a call on GPU memory, by which launches.h launches its kernels again without Python."""

import ctypes

from .c_structs import fields

MOST_PARTS = 4  # kernels of a call: its own, and those that gather and scatter
MOST_WORDS = 512  # words of a kernel's arguments


class LaunchStruct(ctypes.Structure):
    """``launch_t`` of launches.h."""

    _fields_ = fields("launches.h", "launch_t")


class BlockLaunchStruct(ctypes.Structure):
    """``block_launch_t`` of block_launches.h."""

    _fields_ = fields("block_launches.h", "block_launch_t")
