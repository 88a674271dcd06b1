"""A JSON schema as the library is to see it: without what has no meaning, but for which it would refuse the schema.

Pure. Owns no judgement of what is left: the library's.
"""

FORMATS = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
"""Those that the library makes outputs follow. Any other is a remark to the reader, as the standard allows."""
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_PLAIN_VALUES = frozenset({"const", "enum", "default", "examples"})


def prepared(schema: object) -> object:
    """A copy. `true`, which allows any value, as the object that does; places keep their names for a `$ref`."""
    return {} if schema is True else _reduced(schema)


def keys_of(schema: object) -> set[str]:
    """Of every object in it, keywords or not."""
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
