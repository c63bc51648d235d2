"""The line of the start-up banner that tells what the weights take."""

from pinnate.server.lifecycle import _weights


def test_weights_of_one_format_are_shown_together() -> None:
    groups = [
        {"format": name, "bytes": size} for name, size in (("int4", 3 << 20), ("int8", 1 << 19), ("int4", 1 << 20))
    ]
    assert _weights(groups) == "4.0 MiB int4, 0.5 MiB int8"
