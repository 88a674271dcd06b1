"""Formats numbers for people: counts with a noun, bytes in binary units, and short decimals. Pure."""

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def counted(count: float, noun: str) -> str:
    """Format `1 worker`, `0 workers`, `1,024 workers` or `0.5 CPUs`. The plural of the noun must end in s."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Format a number of bytes. A value that would round to 1024.0 of a unit becomes 1.0 of the next one."""
    unit = 0
    while round(count, 1 if unit else 0) >= 1024 and unit < len(UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.1f} {UNITS[unit]}" if unit else f"{count:.0f} B"


def short_decimal(value: float) -> str:
    """Format a number with two decimals, or with none if it is whole."""
    return f"{value:,.2f}".removesuffix(".00")
