"""Hostfiles: both dialects in and out, the examples that ship, errors by line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.errors import FormatError
from blinkmpi.launch.hostfile import Dialect, Host, convert, dialect_of, parse, read, write

EXAMPLES = Path(__file__).parents[3] / "hostfiles"
NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node01 slots=8\nnode02 slots=4\n", [("node01", 8), ("node02", 4)]),
        ("node01:8\nnode02:4", [("node01", 8), ("node02", 4)]),
        ("# all\n\n  node01   slots = 8  # the big one\r\n\tnode02\n", [("node01", 8), ("node02", None)]),
        ("a\nb\na\na\n", [("a", 3), ("b", None)]),
        ("a:2\nb:1\na:3\na\n", [("a", 6), ("b", 1)]),
        ("a slots=3\nb\na\n", [("a", 4), ("b", None)]),
        ("10.0.0.1 slots=2\nnode-a.b_c.example", [("10.0.0.1", 2), ("node-a.b_c.example", None)]),
    ],
)
def test_both_dialects_are_read(text: str, hosts: list[tuple[str, int | None]]) -> None:
    assert parse(text) == tuple(Host(*h) for h in hosts)


@given(
    st.lists(
        st.builds(Host, NAMES, st.none() | st.integers(1, 99)), min_size=1, max_size=6, unique_by=lambda h: h.name
    ),
    st.sampled_from(("openmpi", "hydra")),
)
def test_what_is_written_is_read_back(hosts: list[Host], dialect: Dialect) -> None:
    text = write(hosts, dialect)
    assert parse(text, dialect) == parse(text) == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "dialect", "line", "said"),
    [
        ("node01 slots=8\nnode02:8\n", None, 2, "write 'name slots=N'"),
        ("node01:8\n\nnode02 slots=8\n", None, 3, "write 'name:N'"),
        ("node01:8\n", "openmpi", 1, "write 'name slots=N'"),
        ("node01 slots=8\n", "hydra", 1, "write 'name:N'"),
        ("a\nnode01 slots=x\n", None, 2, "cannot read 'slots=x'"),
        ("node01 slots=8 color=red\n", None, 1, "cannot read"),
        ("node01:\n", None, 1, "cannot read ':'"),
        ("node01:8:9\n", None, 1, "cannot read"),
        ("node01slots=8\n", None, 1, "cannot read '=8'"),
        ("node01 slots=0\n", None, 1, "at least 1"),
        ("node01:0\n", None, 1, "at least 1"),
        ("^node01\n", None, 1, "expected a host's name"),
        ("+n0\n", None, 1, "expected a host's name"),
        ("node01 8\n", None, 1, "cannot read '8'"),
        ("a slots=1\na slots=2\n", None, 2, "on one line"),
        ("a\na slots=2\n", None, 2, "on its first line"),
    ],
)
def test_errors_name_the_line_and_the_remedy(text: str, dialect: Dialect | None, line: int, said: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse(text, dialect, source="hosts.txt")
    assert str(caught.value).startswith(f"hosts.txt:{line}: ")
    assert said in str(caught.value)


def test_a_file_is_converted_with_its_meaning() -> None:
    assert dialect_of("# x\na\nb slots=2\n") == "openmpi"
    assert dialect_of("a\nb:2\n") == "hydra"
    assert dialect_of("a\nb\n") is None
    with pytest.raises(FormatError, match=r"^f:2: "):
        dialect_of("a\n^b\n", source="f")

    one = (Host("a"), Host("b", 2))
    assert convert(one, "hydra", "openmpi") == (Host("a", 1), Host("b", 2)), "Hydra starts one process on a bare name"
    assert convert(one, "hydra", "hydra") == convert(one, None, "openmpi") == one
    with pytest.raises(FormatError, match=r"^a: no slots, .* write slots=N$"):
        convert(one, "openmpi", "hydra")
    two = read(EXAMPLES / "two-nodes-openmpi")
    assert parse(write(convert(two, "openmpi", "hydra"), "hydra"), "hydra") == two


@pytest.mark.parametrize("text", ["", "\n\n", "# only words\n"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="no host"):
        parse(text)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="nowhere"):
        read(tmp_path / "nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="bytes"):
        read(tmp_path / "bytes")


def test_the_examples_that_ship_are_read() -> None:
    found = {path.name: read(path) for path in sorted(EXAMPLES.iterdir())}
    assert found["localhost"] == (Host("localhost", 8),)
    two = (Host("node01", 8), Host("node02", 8))
    assert found["two-nodes-openmpi"] == found["two-nodes-hydra"] == two
    assert found["mixed-openmpi"] == (Host("big01", 8), Host("small01", 4), Host("small02", 2))
    assert found["names"] == (Host("node01"), Host("node02"))
    assert read(EXAMPLES / "two-nodes-openmpi", "openmpi") == read(EXAMPLES / "two-nodes-hydra", "hydra")
    assert all(path.read_text().startswith("#") for path in EXAMPLES.iterdir()), "an example explains itself"
