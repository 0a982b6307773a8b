"""Tests of more ranks than there are GPUs are skipped, with the way to let ranks share one."""

from pathlib import Path

import pytest

from tests.gpu.helpers import GPUS, needs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path.is_relative_to(HERE) and parameters.get("nranks", 0) > GPUS:
            item.add_marker(pytest.mark.skip(reason=needs(parameters["nranks"])))
