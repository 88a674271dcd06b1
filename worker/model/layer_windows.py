"""Layer windows: which layers of a model attend within a window, and how wide, from its config.json.

Each architecture says it in its own way, and transformers' defaults for missing keys are part of the answer. Owns the
refusal of what the named architecture's code would not compute. Imports no torch.
"""

from typing import Any

from blockyard.worker.model.rope import UnsupportedModelError

DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_layer_windows(
    raw: dict[str, Any], architecture: str, num_layers: int, longest_context: int
) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens, the query itself included. None where every earlier token is seen.

    A window no shorter than the longest context hides nothing and is None. Raises UnsupportedModelError.
    """
    match architecture:
        case "Qwen2ForCausalLM" | "Qwen3ForCausalLM":
            windows = _qwen_windows(raw, num_layers)
        case "MistralForCausalLM":
            windows = _uniform(raw, num_layers, _window(raw))
        case "MixtralForCausalLM":
            stated = None if raw.get("sliding_window") is None else _window(raw)
            windows = _uniform(raw, num_layers, stated)
        case "Qwen3MoeForCausalLM":
            # Unlike the dense models, its code reads no max_window_layers.
            stated = _window(raw) if raw.get("use_sliding_window", False) else None
            windows = _uniform(raw, num_layers, stated)
        case _:
            window = None if raw.get("sliding_window") is None else _window(raw)
            if window is not None and window < longest_context:
                raise UnsupportedModelError(
                    f"sliding_window={window}: {architecture} has no attention window"
                )
            windows = _uniform(raw, num_layers, None)
    return tuple(None if window is None or window >= longest_context else window for window in windows)


def _uniform(raw: dict[str, Any], num_layers: int, window: int | None) -> list[int | None]:
    """Return the same window for every layer. A list of kinds that says otherwise belongs to another architecture."""
    kind = LAYER_TYPES[window is not None]
    named = _layer_types(raw, num_layers) or [kind]
    if set(named) != {kind}:
        raise UnsupportedModelError(f"layer_types={named} in config.json: every layer is {kind} here")
    return [window] * num_layers


def _qwen_windows(raw: dict[str, Any], num_layers: int) -> list[int | None]:
    # Qwen's config.json names a window even where use_sliding_window switches it off.
    window = _window(raw) if raw.get("use_sliding_window", False) else None
    kinds = _layer_types(raw, num_layers)
    if kinds is None:
        first = raw.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        if not isinstance(first, int):
            raise UnsupportedModelError(f"max_window_layers={first!r} in config.json must be a whole number")
        return [window if index >= first else None for index in range(num_layers)]
    if "sliding_attention" in kinds and window is None:
        raise UnsupportedModelError(
            f"layer_types={kinds} in config.json: use_sliding_window={raw.get('use_sliding_window')!r} and "
            f"sliding_window={raw.get('sliding_window')!r} give them no window"
        )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _layer_types(raw: dict[str, Any], num_layers: int) -> list[str] | None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return None
    if len(kinds) != num_layers or not set(kinds) <= set(LAYER_TYPES):
        raise UnsupportedModelError(
            f"layer_types={kinds} in config.json must be {num_layers} times one of {', '.join(LAYER_TYPES)}"
        )
    return list(kinds)


def _window(raw: dict[str, Any]) -> int | None:
    window = raw.get("sliding_window", DEFAULT_WINDOW)
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UnsupportedModelError(
            f"sliding_window={window!r} in config.json must be a positive whole number"
        )
    return window
