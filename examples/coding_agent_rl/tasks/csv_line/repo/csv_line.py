"""Lines of comma-separated fields."""


def parse(line: str) -> list[str]:
    """The fields of a line. A quoted field may hold commas."""
    fields = [""]
    quoted = False
    for character in line:
        if character == '"':
            quoted = not quoted
        elif character == "," and not quoted:
            fields.append("")
        else:
            fields[-1] += character
    if quoted:
        raise ValueError("a quote is not closed")
    return fields
