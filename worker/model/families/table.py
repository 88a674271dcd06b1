"""The table of architectures that this engine runs: one row for each name that a config.json may have."""

from blockyard.worker.model.families import (
    gemma3,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from blockyard.worker.model.traits.family import Family
from blockyard.worker.unsupported import UnsupportedModelError

FAMILIES: dict[str, Family] = {
    "Gemma3ForCausalLM": gemma3.FAMILY,
    "Gemma3ForConditionalGeneration": gemma3.WITH_IMAGES,
    "GraniteForCausalLM": granite.FAMILY,
    "Llama4ForCausalLM": llama4.FAMILY,
    "Llama4ForConditionalGeneration": llama4.WITH_IMAGES,
    "LlamaForCausalLM": llama.FAMILY,
    "Ministral3ForCausalLM": mistral.MINISTRAL3,
    "Mistral3ForConditionalGeneration": mistral.WITH_IMAGES,
    "MistralForCausalLM": mistral.FAMILY,
    "MixtralForCausalLM": mixtral.FAMILY,
    "Olmo2ForCausalLM": olmo2.FAMILY,
    "Olmo3ForCausalLM": olmo3.FAMILY,
    "Phi3ForCausalLM": phi3.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
    "Qwen3MoeForCausalLM": qwen3_moe.FAMILY,
}


def find_architecture(named: list[object], *, is_bare: bool) -> str:
    """Return the one architecture that config.json names. Raises UnsupportedModelError for any that is not in the
    table.

    With `is_bare` the checkpoint may lack a head, and name the model without it.
    """
    headed = [
        str(name).removesuffix("Model") + "ForCausalLM" for name in named if str(name).endswith("Model")
    ]
    found = headed or named if is_bare else named
    if len(found) != 1 or found[0] not in FAMILIES:
        raise UnsupportedModelError(f"architectures={named} is not one of {', '.join(FAMILIES)}")
    return str(found[0])
