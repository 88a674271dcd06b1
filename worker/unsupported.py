"""The error for a model that the engine cannot run. Every reader of a config.json raises it."""


class UnsupportedModelError(ValueError):
    """The model needs something that this engine does not have. The message names the field and its value."""
