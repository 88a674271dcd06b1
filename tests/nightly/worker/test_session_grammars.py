"""A real worker compiles grammars in a process of its own."""

import re

from blockyard.proto.text import load_tokenizer
from blockyard.proto.v1.inference_pb2 import StructuredOutput
from blockyard.proto.v1.session_pb2 import RejectReason
from blockyard.worker.config import EngineConfig, WorkerConfig
from blockyard.worker.server import WorkerServer

from tests.unit.worker.test_session import Session
from tests.unit.worker.token_engines import DEMO


def following(regex: str) -> dict[str, StructuredOutput]:
    return {"structured_output": StructuredOutput(regex=regex)}


async def test_a_real_worker_compiles_follows_refuses_and_leaves_no_process_behind() -> None:
    engine = EngineConfig(model=str(DEMO), device="cpu", kv_cache_memory=2**24, max_model_len=256)
    worker = WorkerServer(WorkerConfig(engine=engine, cluster_secret="hush"))
    address = await worker.start()
    try:
        eos = sorted(worker._loaded.model.eos_token_ids)
        tokenizer = load_tokenizer(DEMO)
        async with Session(address) as session:
            await session.submit(1, sampling=following("(a") | {"eos_token_ids": eos})
            rejected = await session.read_until("rejected")
            assert rejected.reason == RejectReason.REJECT_REASON_GRAMMAR
            assert rejected.detail.endswith("it is not valid, a group is not closed")
            sampling = following("[0-9]{4}-[0-9]{2}") | {"eos_token_ids": eos, "n": 2}
            await session.submit(2, max_tokens=30, sampling=sampling)
            outputs = await session.outputs_of((2, 0), (2, 1))
        for tokens in outputs.values():
            text = tokenizer.decode(tokens, skip_special_tokens=True)
            assert re.fullmatch("[0-9]{4}-[0-9]{2}", text), text
        assert worker._grammars is not None
        process = worker._grammars._slots[0].process
        assert process is not None
        assert process.is_alive
    finally:
        await worker.stop(0)
    assert not process.is_alive
