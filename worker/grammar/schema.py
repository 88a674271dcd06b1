"""Preparation of a JSON schema for the library: remove what has no meaning, but would make the library refuse the
schema.

Pure. The library judges what is left.
"""

FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
"""Formats that the library makes outputs follow. Any other is an annotation, as the standard allows."""
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PLAIN_VALUES = frozenset({"const", "enum", "default", "examples"})


def prepared(schema: object) -> object:
    """Return a prepared copy of a schema. `true`, which allows any value, becomes the equivalent object. Places keep
    their names for `$ref`."""
    return {} if schema is True else _reduced(schema)


def keys_of(schema: object) -> set[str]:
    """Return the keys of every object in a schema, keywords or not."""
    keys = set[str]()
    waiting = [schema]
    while waiting:
        match waiting.pop():
            case dict() as item:
                keys.update(item)
                waiting += item.values()
            case list() as item:
                waiting += item
            case _:
                pass
    return keys


def _reduced(schema: object) -> object:
    match schema:
        case dict():
            return {key: _part(key, value) for key, value in schema.items() if not _means_nothing(key, value)}
        case list():
            return [_reduced(part) for part in schema]
        case _:
            return schema


def _part(key: str, value: object) -> object:
    if key in _PLAIN_VALUES:
        return value
    if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
        return {name: _reduced(part) for name, part in value.items()}
    return _reduced(value)


def _means_nothing(key: str, value: object) -> bool:
    match key:
        case "uniqueItems":
            return value is False
        case "format":
            return isinstance(value, str) and value not in FORMATS
        case _:
            return False
