"""Contexts from config.json, and that routers and workers find the same one."""

import json
import shutil
from typing import Any

import pytest
from blockyard.proto.naming.context import longest_context
from blockyard.proto.text import load_tokenizer
from blockyard.router.tokenizing.model_facts import read_facts
from blockyard.worker.model.config import load_config

from tests.unit.router.rig import MODEL
from tests.unit.worker.test_published_configs import PUBLISHED

YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 32_768),
        ({"rope_scaling": YARN}, 131_072),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 8192}}, 32_768),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, 131_072),
        ({"rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, 131_072),
        ({"rope_parameters": LONG}, 4096),
        ({"rope_scaling": {**LONG, "rope_type": "su"}}, 4096),
        ({"rope_scaling": LONG, "original_max_position_embeddings": 8192}, 8192),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32_768),
        ({"rope_scaling": YARN | {"factor": "four"}}, 32_768),
        ({"rope_scaling": YARN | {"factor": 1e308}}, 32_768),
        ({"rope_scaling": LONG | {"original_max_position_embeddings": "many"}}, 32_768),
        ({"rope_scaling": [1]}, 32_768),
        ({"rope_parameters": {"full_attention": 3}}, 32_768),
    ],
)
def test_rope_scaling_changes_the_context(fields: dict[str, Any], expected: int) -> None:
    assert longest_context({"max_position_embeddings": 32_768} | fields) == expected


def test_a_context_that_is_no_count_is_refused() -> None:
    for stated in (None, 0, -1, True, 4096.0, "4096"):
        with pytest.raises(ValueError, match="max_position_embeddings must be a positive integer"):
            longest_context({"max_position_embeddings": stated})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_router_knows_the_context_of_a_published_model_before_any_worker_has_come(name, tmp_path):
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    facts = read_facts(tmp_path, names=(name,), tokenizer=load_tokenizer(MODEL))
    assert facts.max_position_embeddings == load_config(tmp_path).max_position_embeddings
