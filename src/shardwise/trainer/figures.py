"""Numbers as people read them: three digits, and a unit that fits. Pure."""


def size(num_bytes: float) -> str:
    """In powers of ten, as data sheets count: 1.35 GB."""
    return _scaled(num_bytes, [("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)], "B")


def count(number: float) -> str:
    """8.03B, 1.71M, 512."""
    return _scaled(number, [("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)], "").replace(" ", "")


def _scaled(number: float, units: list[tuple[str, float]], smallest: str) -> str:
    for unit, factor in units:
        # What would be rounded up to 1000 of a unit is 1 of the next.
        if number >= 0.9995 * factor:
            scaled = number / factor
            return f"{scaled:,.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    return f"{number:.0f} {smallest}".strip()


def duration(seconds: float) -> str:
    """0:42, 12:05, 3:12:05, 2 d 3:12:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if not (hours or days):
        return f"{minutes}:{rest:02}"
    return f"{f'{days} d ' if days else ''}{hours}:{minutes:02}:{rest:02}"


def plural(number: int, word: str) -> str:
    """1 rank, 1,200 steps, 2 batches."""
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{ending}"
