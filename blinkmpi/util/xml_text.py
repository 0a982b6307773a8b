"""Parse an XML text that a user gives: within limits that are looked at before anything is built, without entities."""

import xml.etree.ElementTree as ET

MOST_ELEMENTS = 1 << 17
MOST_ATTRIBUTES = 12 * MOST_ELEMENTS
MOST_BETWEEN = 1 << 16  # letters of a tag and what follows it


def parsed(text: str | bytes) -> ET.Element | None:
    """The outermost element; None for a text that declares a document type, whose entities can grow without end.

    Raises:
        ValueError: for what is no XML, and for more than is taken, with the limit.
    """
    plain = text if isinstance(text, bytes) else text.encode()
    tags = plain.count(b"<")
    for found, most, what in (
        (tags - plain.count(b"</"), MOST_ELEMENTS, "elements"),
        (tags, 2 * MOST_ELEMENTS, "tags"),
        (plain.count(b"="), MOST_ATTRIBUTES, "attributes"),
        (max(map(len, plain.split(b"<"))) if tags <= 2 * MOST_ELEMENTS else 0, MOST_BETWEEN, "letters from tag to tag"),
    ):
        if found > most:
            raise ValueError(f"{found} {what}; at most {most} are taken")
    try:
        decoded = plain.decode()
        return ET.fromstring(decoded) if "<!DOCTYPE" not in decoded else None
    except (ET.ParseError, UnicodeError) as error:
        raise ValueError(str(error)) from error
