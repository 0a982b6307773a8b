"""The hosts of a job: hostfiles of both dialects, and what schedulers say in the environment; errors name the place."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blinkmpi.errors import ArgumentError, FormatError
from blinkmpi.launch.allocation import MOST, allocation, nodelist, scheduler_of, tasks_per_node
from blinkmpi.launch.hostfile import Dialect, Host, convert, dialect_of, parse, read, write

# ---------------------------------------------------------------- hostfiles


EXAMPLES = Path(__file__).parents[3] / "hostfiles"
NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)


@pytest.mark.parametrize(("text", "hosts"), [
    ("node01 slots=8\nnode02 slots=4\n", [("node01", 8), ("node02", 4)]),
    ("node01:8\nnode02:4", [("node01", 8), ("node02", 4)]),
    ("# all\n\n  node01   slots = 8  # the big one\r\n\tnode02\n", [("node01", 8), ("node02", None)]),
    ("a\nb\na\na\n", [("a", 3), ("b", None)]),
    ("a:2\nb:1\na:3\na\n", [("a", 6), ("b", 1)]),
    ("a slots=3\nb\na\n", [("a", 4), ("b", None)]),
    ("10.0.0.1 slots=2\nnode-a.b_c.example", [("10.0.0.1", 2), ("node-a.b_c.example", None)]),
])  # fmt: skip
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


@pytest.mark.parametrize(("text", "dialect", "line", "said"), [
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
])  # fmt: skip
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


# ---------------------------------------------------------------- what schedulers say


@pytest.mark.parametrize(("text", "names"), [
    ("node1", "node1"),
    ("node1,login", "node1 login"),
    ("node[1-3]", "node1 node2 node3"),
    ("node[08-11,3,020]", "node08 node09 node10 node11 node3 node020"),
    ("node[8-10]", "node8 node9 node10"),
    ("gpu-a[1,3].site,x[2-2]", "gpu-a1.site gpu-a3.site x2"),
    ("rack[1-2]n[3-4]-ib", "rack1n3-ib rack1n4-ib rack2n3-ib rack2n4-ib"),
    ("b,a", "b a"),
])  # fmt: skip
def test_a_node_list_is_spelt_out(text: str, names: str) -> None:
    assert " ".join(nodelist(text)) == names


@pytest.mark.slow
@given(st.integers(0, 2000), st.integers(0, 50), st.integers(1, 5))
def test_ranges_keep_their_zeros(low: int, more: int, width: int) -> None:
    text = f"n[{low:0{width}d}-{low + more:0{width}d}]"
    assert nodelist(text) == tuple(f"n{number:0{width}d}" for number in range(low, low + more + 1))


@pytest.mark.parametrize(("text", "said"), [
    ("node[1-3", "brackets do not match"),
    ("node1-3]", "brackets do not match"),
    ("node[[1]]", "brackets do not match"),
    ("node[]", "cannot read ''"),
    ("node[1-]", "cannot read '1-'"),
    ("node[a-b]", "cannot read 'a-b'"),
    ("node[3-1]", "from 3 to 1; write the smaller number first"),
    ("", "no name of a machine"),
    ("a,,b", "no name of a machine"),
    ("a b", "no name of a machine"),
    ("n[1-300]m[1-300]", f"more than {MOST}"),
    ("n[1-999999999]", "from 1 to 999999999"),
])  # fmt: skip
def test_a_bad_node_list_is_named(text: str, said: str) -> None:
    with pytest.raises(FormatError) as caught:
        nodelist(text)
    assert str(caught.value).startswith("SLURM_JOB_NODELIST: ")
    assert said in str(caught.value)


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == (2, 2, 2, 1)
    assert tasks_per_node("8") == (8,)
    assert tasks_per_node("1,2(x2)") == (1, 2, 2)


@pytest.mark.parametrize("text", ["", "2,", "x3", "2(3)", "2(x)", "2(x0)", "0", "-1", "2(x99999999)"])
def test_bad_tasks_per_node_are_named(text: str) -> None:
    with pytest.raises(FormatError, match=r"^SLURM_TASKS_PER_NODE: .*such as 2\(x3\),1"):
        tasks_per_node(text)


def test_slurm() -> None:
    found = allocation({"SLURM_JOB_NODELIST": "n[1-3],big", "SLURM_TASKS_PER_NODE": "2(x3),8"})
    assert found.scheduler == "slurm"
    assert found.hosts == (Host("n1", 2), Host("n2", 2), Host("n3", 2), Host("big", 8))
    assert found.ranks == 14
    old = allocation({"SLURM_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1"})
    assert old.hosts == (Host("n1", 1),)


def test_slurm_that_contradicts_itself() -> None:
    with pytest.raises(FormatError, match=r"counts for 3 nodes, but SLURM_JOB_NODELIST 'n\[1-2\]' names 2"):
        allocation({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x3)"})
    with pytest.raises(FormatError, match="SLURM_TASKS_PER_NODE is not"):
        allocation({"SLURM_JOB_NODELIST": "n[1-2]"})


def test_pbs_and_lsf_files_have_a_line_for_each_process(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a.site\na.site\nb.site\na.site\n")
    hosts = (Host("a.site", 3), Host("b.site", 1))
    pbs = allocation({"PBS_NODEFILE": str(file)})
    assert (pbs.scheduler, pbs.hosts) == ("pbs", hosts)
    lsf = allocation({"LSB_DJOB_HOSTFILE": str(file)})
    assert (lsf.scheduler, lsf.hosts) == ("lsf", hosts)
    file.write_text("a\n-b\n")
    with pytest.raises(FormatError, match=f"^{file}:2: '-b': expected a host's name"):
        allocation({"PBS_NODEFILE": str(file)})
    with pytest.raises(FormatError, match="nowhere"):
        allocation({"PBS_NODEFILE": str(tmp_path / "nowhere")})


def test_lsf_pairs() -> None:
    assert allocation({"LSB_MCPU_HOSTS": "a 4 b 2 a 1 "}).hosts == (Host("a", 5), Host("b", 2))
    for text, said in (("a 4 b", "'b' stands alone"), ("a x", "'a' 'x'"), ("a 0", "from 1 on"), ("-a 1", "'-a'")):
        with pytest.raises(FormatError, match=said):
            allocation({"LSB_MCPU_HOSTS": text})


def test_whose_job_it_is() -> None:
    assert scheduler_of({}) is None
    assert scheduler_of({"SLURM_JOB_ID": "1"}) == scheduler_of({"SLURM_JOBID": "1"}) == "slurm"
    assert scheduler_of({"PBS_JOBID": "1"}) == "pbs"
    assert scheduler_of({"LSB_JOBID": "1"}) == "lsf"
    with pytest.raises(ArgumentError, match=r"none of SLURM_JOB_NODELIST.*or give a hostfile"):
        allocation({})
