"""Documents in the folder where what was measured is kept (``cache_folder``)."""

from pathlib import Path
from typing import TypeVar

from ..errors import SettingsError
from .cache_folder import read_kept
from .codec import Document
from .text import brief

D = TypeVar("D", bound=Document)


def kept_document(path: Path, kind: type[D]) -> D | None:
    """What a file of the folder says, or None if there is no file.

    Raises:
        FormatError, SettingsError: if it cannot be read.
    """
    where = brief(str(path))
    try:
        text = read_kept(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingsError(f"cannot read {where}: {error.strerror}; remove it, or set BLINKMPI_CACHE_DIR") from error
    return kind.from_json(text, source=where)
