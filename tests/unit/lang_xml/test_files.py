"""Files of others, from a folder that the user names: each is proved, or the test says what is wrong with it.

``BLINKMPI_MSCCL_XML=msccl-scheduler/tools/msccl-algorithms``; they are not part of this repository.
"""

import os
from pathlib import Path

import pytest

from blinkmpi.lang.xml.check import judge
from blinkmpi.lang.xml.export import export
from blinkmpi.lang.xml.file import load_xml, parse_xml, write_xml

FOLDER = os.environ.get("BLINKMPI_MSCCL_XML", "")
FILES = sorted(Path(FOLDER).rglob("*.xml")) if FOLDER else [Path("none")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_file_is_proved_and_written_again(path: Path) -> None:
    if not FOLDER:
        pytest.skip("BLINKMPI_MSCCL_XML names no folder with MSCCL's XML files")
    algorithm = load_xml(path)
    assert parse_xml(write_xml(algorithm)) == algorithm
    report, flow = judge(algorithm)
    assert [fault.text for fault in report.faults] == []
    assert flow is not None
    again = export(flow, name=path.stem, protocol=algorithm.protocol, in_place=algorithm.in_place, channels=4)
    report, _ = judge(again)
    assert [fault.text for fault in report.faults] == []
