"""Adapter names: which adapter a request names, in `lora_name` or in place of a model.

Pure. Does not own which adapters exist (../adapters/registry.py), or the names of the model (validation.py).
"""

from blockyard.proto.naming.identifiers import is_id
from blockyard.proto.v1 import admin_pb2, cluster_pb2, inference_pb2
from blockyard.router.adapters.registry import AdapterRegistry, RegisteredAdapter
from blockyard.router.errors import FieldViolation, UnknownModel, Unsupported
from blockyard.router.request.validation import check_model_name
from blockyard.router.tokenizing.model_facts import ModelFacts

NamesAdapter = (
    inference_pb2.GenerateRequest
    | cluster_pb2.LookupPrefixRequest
    | cluster_pb2.ExplainPlacementRequest
    | admin_pb2.PullPrefixRequest
)


def named_adapter(
    message: NamesAdapter, registry: AdapterRegistry, facts: ModelFacts, tenant: str
) -> RegisteredAdapter | None:
    """Return the adapter that a request of this tenant names, or None if it wants the bare model.

    Raises UnknownModel for a name that no adapter of the tenant and no model has. An adapter of another tenant is as
    unknown as one that does not exist.
    """
    model = None
    if not isinstance(message, admin_pb2.PullPrefixRequest) and message.HasField("model"):
        model = message.model
    if message.HasField("lora_name"):
        adapter = registry.find(message.lora_name, tenant)
        if adapter is None:
            raise _unknown(message.lora_name)
        if model is not None and model != adapter.name:
            check_model_name(model, facts.names)
        return adapter
    return None if model is None or model in facts.names else registry.find(model, tenant)


def refuse_adapter(
    message: inference_pb2.EmbedRequest, registry: AdapterRegistry, facts: ModelFacts, tenant: str
) -> None:
    """Raise Unsupported for a request that wants an embedding of an adapter."""
    if message.model not in facts.names and registry.find(message.model, tenant) is not None:
        raise Unsupported.of("model", "is an adapter, which makes no embeddings")


def _unknown(name: str) -> UnknownModel:
    asked = f"adapter `{name}`" if is_id(name) else "adapter asked for"
    violation = FieldViolation(field="lora_name", description="must be one that has been added")
    return UnknownModel(f"The {asked} does not exist.", violations=(violation,))
