"""What every registry asks of an entry before it takes it."""

from __future__ import annotations

from collections.abc import Iterable


def check_entry(
    what: str,
    entry: object,
    base: type,
    words: Iterable[str] = ("name",),
    methods: Iterable[str] = (),
) -> None:
    """Check that an entry has all that it must say of itself.

    Args:
        what: names the key in messages.
        base: the class whose subclass's instance it must be.
        words: attributes that hold text.
        methods: those of `base` that it must define.

    Raises:
        ValueError: naming the entry and what it lacks.
    """
    if not isinstance(entry, base):
        raise ValueError(f"{what} {entry!r}: must be an instance of a subclass of {base.__name__}")
    kind = type(entry)
    named = f"{what} {getattr(entry, 'name', kind.__name__)!r}"
    for word in words:
        value = getattr(entry, word, None)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{named}: its class {kind.__name__} must give {word}, a text")
    lacking = [name for name in methods if getattr(kind, name) is getattr(base, name)]
    if lacking:
        raise ValueError(f"{named}: its class {kind.__name__} must define {', '.join(lacking)}")
    for name in dir(base):
        is_method = callable(getattr(base, name)) and not name.startswith("_")
        if is_method and not callable(getattr(kind, name)):
            raise ValueError(f"{named}: {kind.__name__}.{name} must be a method")
