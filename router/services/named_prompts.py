"""Named prompts: a call's prompt as the names of its blocks, for calls that ask about a prefix and generate nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blockyard.proto.naming.block_hash import split_names
from blockyard.router.calls.bounds import CallBounds
from blockyard.router.generation.generation import RouterParts, tokenise
from blockyard.router.request.adapter_names import named_adapter
from blockyard.router.request.prompts import check_context, prompt_estimate
from blockyard.router.request.validation import PrefixQuestion, valid_question
from blockyard.router.services.interceptor import Context


@asynccontextmanager
async def named(
    parts: RouterParts, bounds: CallBounds, request: PrefixQuestion, context: Context
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Charge and tokenize the prompt. Yield its number of tokens and the names of its full blocks.

    The charge and the deadline last for the life of the context.
    """
    prompt = valid_question(request, parts.facts, max_model_len=parts.max_model_len)
    salt, caller = request.cache_salt, bounds.caller(context)
    adapter = named_adapter(request, parts.adapters.registry, parts.facts, caller.tenant)
    async with bounds.admitted(context, prompt_estimate(prompt), parts.ledger) as charge:
        identity = await parts.placer.identity()
        prepared = await tokenise(
            parts,
            prompt,
            charge,
            root=parts.root(
                identity, salt, realm=caller.realm, is_public=request.public_prefix, adapter=adapter
            ),
            block_size=identity.block_size,
            client=caller.client,
        )
        check_context(prepared.num_tokens, identity.max_model_len)
        yield prepared.num_tokens, split_names(prepared.block_names)[1:]
