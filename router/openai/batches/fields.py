"""Fields of the body that creates a batch. Owns their checks and descriptions."""

from collections.abc import Mapping
from typing import Any

from blockyard.router.errors import InvalidRequest
from blockyard.router.openai.requests.fields import Fields, Kind, mapping, text

WINDOW = "24h"
MAX_PAIRS, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
CREATE_FIELDS: Fields = {
    "input_file_id": text.said("The file of requests, uploaded with the purpose batch."),
    "endpoint": text.said(
        "The path of all its requests: that of chats, completions, responses or embeddings."
    ),
    "completion_window": Kind(text.check, {"const": WINDOW}).said("When it must have ended."),
    "metadata": Kind(
        mapping.check,
        {
            **mapping.schema,
            "maxProperties": MAX_PAIRS,
            "propertyNames": {"maxLength": MAX_KEY_CHARACTERS},
            "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_CHARACTERS},
        },
    ).said("Pairs of strings, which come back with the batch."),
}


def checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return the metadata. Raises InvalidRequest for what is not pairs of short strings."""
    if metadata is None:
        return None
    if len(metadata) > MAX_PAIRS:
        raise InvalidRequest.of("metadata", f"must have at most {MAX_PAIRS} pairs")
    for key, value in metadata.items():
        if len(text("metadata", key)) > MAX_KEY_CHARACTERS:
            raise InvalidRequest.of("metadata", f"a key must have at most {MAX_KEY_CHARACTERS} characters")
        if len(text("metadata", value)) > MAX_VALUE_CHARACTERS:
            raise InvalidRequest.of(
                "metadata", f"a value must have at most {MAX_VALUE_CHARACTERS} characters"
            )
    return dict(metadata)
