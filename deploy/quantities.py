"""Numbers as people read them: counts with their noun, bytes in binary units, decimals only where they say something.
Pure.
"""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: float, noun: str) -> str:
    """`1 worker`, `0 workers`, `1,024 workers`, `0.5 CPUs`. For nouns whose plural has an s."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Never 1024.0 of a unit: what would round to that is 1.0 of the next one."""
    unit = 0
    while round(count, 1 if unit else 0) >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {UNITS[unit]}" if unit else f"{count:.0f} B"


def short_decimal(value: float) -> str:
    """At most two decimals, and none for a whole number."""
    return f"{value:,.2f}".removesuffix(".00")
