"""Reading MSCCL's XML: both spellings, what is left out, and what is refused with its place."""

from pathlib import Path

import pytest

from blinkmpi.errors import FormatError
from blinkmpi.lang.xml.export import export
from blinkmpi.lang.xml.file import XmlStep, load_xml, parse_xml, write_xml
from tests.unit.lang_xml.flows import MAKERS

STEP = '<step s="0" type="{type}" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>'
GOOD = f"""<!-- a comment -->
<algo name="two" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="0"
      outofplace="1" minBytes="0" maxBytes="4096" redop="sum">
  <gpu id="1" i_chunks="1" o_chunks="1" s_chunks="0">
    <tb id="0" send="-1" recv="0" chan="0">{STEP.format(type="rrc")}</tb>
  </gpu>
  <gpu id="0" i_chunks="1" o_chunks="1" s_chunks="0">
    <tb id="0" send="1" recv="-1" chan="0">{STEP.format(type="s")}</tb>
  </gpu>
</algo>"""
SHORTER = """<algo name="two" proto="LL" nchannels="1" ngpus="2" coll="all_reduce" inplace="1">
  <gpu id="0" i_chunks="3" o_chunks="0" s_chunks="0"><tb id="0" send="1" recv="-1" chan="0">
    <op step="0" type="s" buf="i" off="0" cnt="2"/><op step="1" type="s" buf="i" off="2" hasdep="1"/></tb>
  </gpu>
  <gpu id="1" i_chunks="3" o_chunks="0" s_chunks="0"><tb id="0" send="-1" recv="0" chan="0">
    <op step="0" type="rrc" buf="i" off="0" cnt="2"/><op step="1" type="r" buf="i" off="2" depid="0" deps="0"/></tb>
  </gpu>
</algo>"""


def test_a_file_is_read_in_the_order_of_ranks() -> None:
    found = parse_xml(GOOD)
    assert (found.name, found.collective, found.chunks, found.max_bytes) == ("two", "allreduce", 1, 4096)
    assert (found.in_place, found.out_of_place, found.steps, found.root) == (False, True, 2, -1)
    assert found.gpus[0].blocks[0].steps == (XmlStep("s", src=("i", 0)),)
    assert found.gpus[1].blocks[0].steps == (XmlStep("rrc", src=("i", 0), dst=("o", 0)),)


def test_fields_that_a_type_does_not_have_are_noise() -> None:
    noisy = GOOD.replace('type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0"',
                         'type="s" srcbuf="i" srcoff="0" dstbuf="?" dstoff="-7"')  # fmt: skip
    assert noisy != GOOD
    assert parse_xml(noisy) == parse_xml(GOOD)


def test_a_file_without_outofplace_is_for_one_kind_of_call() -> None:
    older = GOOD.replace('outofplace="1" ', "")
    assert parse_xml(older) == parse_xml(GOOD)
    found = parse_xml(older.replace('inplace="0"', 'inplace="1"'))
    assert (found.in_place, found.out_of_place) == (True, False)


def test_the_shorter_spelling_leaves_out_defaults() -> None:
    found = parse_xml(SHORTER)
    assert (found.chunks, found.in_place, found.out_of_place) == (3, True, False)
    assert found.gpus[0].blocks[0].steps == (
        XmlStep("s", src=("i", 0), count=2), XmlStep("s", src=("i", 2), awaited=True)
    )  # fmt: skip
    assert found.gpus[1].blocks[0].steps == (
        XmlStep("rrc", src=("i", 0), dst=("i", 0), count=2), XmlStep("r", dst=("i", 2), depid=0, deps=0)
    )  # fmt: skip


@pytest.mark.parametrize("name", list(MAKERS))
def test_what_is_written_is_read_again(name: str) -> None:
    made = export(MAKERS[name](), name=f"<{name} & 'so on'>", in_place=True, channels=2)
    assert parse_xml(write_xml(made)) == made


def test_copies_before_the_steps_are_read_and_written() -> None:
    found = parse_xml(GOOD.replace('s_chunks="0">', 's_chunks="0"><copy i_off="0" o_off="0"/>'))
    assert [gpu.copies for gpu in found.gpus] == [((0, 0),), ((0, 0),)]
    assert parse_xml(write_xml(found)) == found


BAD = [
    ("<algo", "<", "not XML"),
    ("<!-- a comment -->", "<!DOCTYPE a [<!ENTITY x 'y'>]>", "declares a document type"),
    ('coll="allreduce"', 'coll="scan"', "<algo> coll='scan': expected one of allreduce"),
    ('coll="allreduce"', "", "<algo> has no coll; add it"),
    ('proto="Simple"', 'proto="Fast"', "proto='Fast': expected one of Simple, LL, LL128"),
    ('ngpus="2"', 'ngpus="3"', "ngpus=3, and there are 2 <gpu>"),
    ('gpu id="1"', 'gpu id="0"', "gpu 0 is there twice"),
    ('gpu id="1"', 'gpu id="2"', "the ids of <gpu> are 0, 2; expected 0..n-1"),
    ('tb id="0" send="-1"', 'tb id="1" send="-1"', "gpu 1: the ids of <tb> are 1; expected 0.. without gaps"),
    ('nchunksperloop="1"', 'nchunksperloop="0"', "nchunksperloop is '0'; expected a whole number of 1..131072"),
    ('inplace="0"', 'inplace="yes"', "inplace is 'yes'; expected a whole number of 0..1"),
    ('maxBytes="4096"', 'maxBytes="4K"', "maxBytes is '4K'; expected a number of bytes"),
    ('s_chunks="0"', "", "s_chunks is not there"),
    ('s_chunks="0"', 's_chunks="99999999"', "s_chunks is '99999999'"),
    ('send="1"', 'send="one"', "gpu 0 tb 0: send is 'one'"),
    ('type="rrc"', 'type="xyz"', "gpu 1 tb 0 step 0 type='xyz': expected one of cpy, nop, r, rcs"),
    ('s="0" type="rrc"', 's="1" type="rrc"', "gpu 1 tb 0 step 0 is numbered 1; expected 0"),
    ('srcoff="0" dstbuf', 'srcoff="-1" dstbuf', "gpu 1 tb 0 step 0: srcoff is '-1'"),
    ('dstbuf="o"', 'dstbuf="x"', "gpu 1 tb 0 step 0 dstbuf='x': expected i, o or s"),
    ('cnt="1"', 'cnt="0"', "gpu 1 tb 0 step 0: cnt is '0'"),
    ('cnt="1"', f'cnt="{"9" * 5000}"', "gpu 1 tb 0 step 0: cnt is '9"),
    ('hasdep="0"', "", "gpu 1 tb 0 step 0: hasdep is not there"),
    ('depid="-1"', 'depid=" 1"', "gpu 1 tb 0 step 0: depid is ' 1'"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[message[:40] for _, _, message in BAD])
def test_what_is_wrong_is_named_with_its_place(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(FormatError) as caught:
        parse_xml(GOOD.replace(old, new, 1), "two.xml")
    assert str(caught.value).startswith("two.xml: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_shorter_spelling_cannot_say_a_local_copy() -> None:
    with pytest.raises(FormatError, match="gpu 1 tb 0 step 0: cpy has two places, and <op> only one"):
        parse_xml(SHORTER.replace('type="rrc"', 'type="cpy"'))


def test_another_document_is_refused() -> None:
    with pytest.raises(FormatError, match="expected <algo> outside, got <system>"):
        parse_xml("<system/>")


def test_a_file_that_moves_too_much_is_refused() -> None:
    steps = "".join(STEP.format(type="s").replace('s="0"', f's="{i}"', 1) for i in range(1, 10))
    many = GOOD.replace("</tb>", steps + "</tb>").replace('cnt="1"', 'cnt="131072"')
    with pytest.raises(FormatError, match="its steps move 2621440 chunks; more than 131072 are not read"):
        parse_xml(many)


def test_a_file_whose_results_are_too_many_is_refused() -> None:
    gpus = "".join(f'<gpu id="{g}" i_chunks="1" o_chunks="1" s_chunks="0"/>' for g in range(100))
    text = f"{GOOD[: GOOD.index('  <gpu')]}{gpus}</algo>".replace('ngpus="2"', 'ngpus="100"')
    assert len(parse_xml(text).gpus) == 100
    with pytest.raises(FormatError, match="nchunksperloop=10000: results of that size are not checked"):
        parse_xml(text.replace('nchunksperloop="1"', 'nchunksperloop="10000"'))


def test_a_file_is_loaded_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "two.xml"
    path.write_text(GOOD)
    assert load_xml(path) == parse_xml(GOOD)
    with pytest.raises(FormatError, match=r"cannot read .*No such file"):
        load_xml(tmp_path / "none.xml")
    path.write_bytes(b"\xff\xfe<algo/>")
    with pytest.raises(FormatError, match="not XML"):
        load_xml(path)
