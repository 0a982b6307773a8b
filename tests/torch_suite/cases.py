"""torch's test cases with our backend; imported by the program that starts them and by every process that they start.

``BACKEND``, ``WORLD_SIZE`` and ``TEMP_DIR`` must be set before.
"""

import unittest

import torch
from torch.testing._internal.common_distributed import DistTestCases

import blinkmpi.torch  # noqa: F401

for feature in ("gpu", "cuda", "ddp", "subgroup"):
    DistTestCases.backend_feature[feature].add("blink")

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest,
    TestDistBackend,
)


class TestBlink(TestDistBackend, DistributedTest._DistTestBase):
    """What torch asks of any backend: collectives, messages, groups, objects, DDP."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


del TestDistBackend  # a case without tests of its own
ALL: tuple[type[unittest.TestCase], ...] = (TestBlink,)
torch.set_num_threads(1)
