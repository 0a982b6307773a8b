"""The picture of an algorithm: its messages in their steps, and the file."""

import sys
from pathlib import Path

import pytest

from blinkmpi.errors import ArgumentError
from blinkmpi.lang import Algorithm, library, picture
from blinkmpi.lang.picture import DrawnMessage, messages_of

PAGE = Path(__file__).resolve().parents[3] / "docs" / "lang.md"


def test_a_chunk_of_a_ring_goes_round_twice() -> None:
    assert messages_of(library.ring(3).flow, 0) == [
        DrawnMessage(0, 1, 2, 0, True), DrawnMessage(1, 2, 0, 0, True),
        DrawnMessage(2, 0, 1, 0, False), DrawnMessage(3, 1, 2, 0, False),
    ]  # fmt: skip
    assert len(messages_of(library.ring(3).flow)) == 12


@pytest.mark.parametrize("chunk", [None, 0])
def test_pictures_are_written_and_equal_ones_are_equal_files(tmp_path: Path, chunk: int | None) -> None:
    for name in ("one.svg", "two.svg"):
        library.islands(6, 3).plot(str(tmp_path / name), chunk=chunk)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert "islands: allreduce of 6 ranks" in text
    assert ("chunk 0" in text) == (chunk == 0)


@pytest.mark.parametrize("made", [library.ring(4), library.one_step(2), library.all_pairs(12)], ids=lambda it: it.name)
def test_all_that_is_written_lies_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Algorithm) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an extra: pip install 'blinkmpi[plot]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    drawn = []
    monkeypatch.setattr(picture, "save", lambda figure, path: drawn.append(figure))
    made.plot(str(tmp_path / "one.png"))
    renderer = FigureCanvasAgg(drawn[0]).get_renderer()
    texts = [text for text in drawn[0].findobj(Text) if text.get_text()]
    assert len(texts) > made.n
    for text in texts:
        box = text.get_window_extent(renderer)
        assert drawn[0].bbox.x0 <= box.x0 <= box.x1 <= drawn[0].bbox.x1, text.get_text()
        assert drawn[0].bbox.y0 <= box.y0 <= box.y1 <= drawn[0].bbox.y1, text.get_text()


def test_the_picture_of_the_page_is_of_its_ring(tmp_path: Path) -> None:
    assert "![](ring.svg)" in PAGE.read_text(encoding="utf-8")
    text = (PAGE.parent / "ring.svg").read_text(encoding="utf-8")
    assert "ring: allreduce of 4 ranks" in text
    assert f"{len(messages_of(library.ring(4).flow))} messages" in text


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"pictures need matplotlib .*pip install 'blinkmpi\[plot\]'"):
        library.ring(3).plot(str(tmp_path / "x.svg"))


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="ring has no chunk 3; it has 3"):
        library.ring(3).plot(str(tmp_path / "x.svg"), chunk=3)
    with pytest.raises(ArgumentError, match="ring has 4140 messages; at most 4000 can be drawn"):
        library.ring(46).plot(str(tmp_path / "x.svg"))
    with pytest.raises(ArgumentError, match="expected a name that ends in"):
        library.ring(3).plot(str(tmp_path / "x.txt"))
