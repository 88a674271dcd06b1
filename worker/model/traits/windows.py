"""Layer windows: which layers of a model attend within a window, and how wide, from its config.json.

Each family says it in its own way, and transformers' defaults for missing keys are part of the answer. Owns the refusal
of what the family's own code would not compute. Imports no torch.
"""

from blockyard.worker.model.traits.family import RawConfig, Sizes
from blockyard.worker.unsupported import UnsupportedModelError

Windows = tuple[int | None, ...]

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
LAYER_TYPES = ("full_attention", "sliding_attention")


def no_windows(raw: RawConfig, sizes: Sizes) -> Windows:
    """Return no window for any layer. A window that would hide nothing may be named."""
    window = None if raw.get("sliding_window") is None else read_window(raw)
    if window is not None and window < sizes.longest_context:
        raise UnsupportedModelError(f"sliding_window={window}: this architecture has no attention window")
    return _uniform(raw, sizes, None)


def one_window(raw: RawConfig, sizes: Sizes, default: int | None = DEFAULT_WINDOW) -> Windows:
    """Return the same window for every layer, the default where none is named."""
    return _uniform(raw, sizes, read_window(raw, default))


def qwen_windows(raw: RawConfig, sizes: Sizes) -> Windows:
    """Return the windows of the layers from `max_window_layers` on, or of those that `layer_types` names."""
    # Qwen's config.json names a window even where use_sliding_window switches it off.
    window = read_window(raw) if raw.get("use_sliding_window", False) else None
    kinds = read_layer_types(raw, sizes)
    if kinds is None:
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int):
            raise UnsupportedModelError(f"max_window_layers={first!r} in config.json must be a whole number")
        return tuple(window if index >= first else None for index in range(sizes.num_layers))
    if "sliding_attention" in kinds and window is None:
        raise UnsupportedModelError(
            f"layer_types={kinds} in config.json: use_sliding_window={raw.get('use_sliding_window')!r} and "
            f"sliding_window={raw.get('sliding_window')!r} give them no window"
        )
    return by_layer_types(kinds, window)


def by_layer_types(kinds: list[str], window: int | None) -> Windows:
    """Return the window for the layers of the kind that has one."""
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def kinds_by_pattern(every: object, sizes: Sizes) -> list[str]:
    """Return the kind of each layer, where the last of `every` so many layers has no window."""
    if not isinstance(every, int) or every < 1:
        raise UnsupportedModelError(
            f"sliding_window_pattern={every!r} in config.json must be a positive whole number"
        )
    return [LAYER_TYPES[bool((index + 1) % every)] for index in range(sizes.num_layers)]


def read_layer_types(raw: RawConfig, sizes: Sizes) -> list[str] | None:
    """Return the kind of each layer, or None where config.json does not list them."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if len(kinds) != sizes.num_layers or not set(kinds) <= set(LAYER_TYPES):
        raise UnsupportedModelError(
            f"layer_types={kinds} in config.json must be {sizes.num_layers} times one of {', '.join(LAYER_TYPES)}"
        )
    return list(kinds)


def read_window(raw: RawConfig, default: int | None = DEFAULT_WINDOW) -> int | None:
    window = raw.get("sliding_window", default)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UnsupportedModelError(
            f"sliding_window={window!r} in config.json must be a positive whole number"
        )
    return window


def _uniform(raw: RawConfig, sizes: Sizes, window: int | None) -> Windows:
    """Return the same window for every layer. A list of kinds that says otherwise belongs to another architecture."""
    kind = LAYER_TYPES[window is not None]
    named = read_layer_types(raw, sizes) or [kind]
    if set(named) != {kind}:
        raise UnsupportedModelError(f"layer_types={named} in config.json: every layer is {kind} here")
    return (window,) * sizes.num_layers
