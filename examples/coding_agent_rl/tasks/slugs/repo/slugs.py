"""Titles as parts of an address."""

import unicodedata


def plain(text: str) -> str:
    """The text without accents: letters that have a plain form get it."""
    decomposed = unicodedata.normalize("NFKD", text)
    return "".join(character for character in decomposed if not unicodedata.combining(character))


def slugify(title: str) -> str:
    """The title as a slug."""
    characters = [c if c.isascii() and c.isalnum() else "-" for c in plain(title).lower()]
    return "".join(characters)
