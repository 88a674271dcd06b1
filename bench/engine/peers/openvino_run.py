"""OpenVINO GenAI's ContinuousBatchingPipeline as a system under test, on a model that openvino_convert.py has made.

Imports nothing from Blockyard; see protocol.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from protocol import Loaded, Settings, serve, stepped

PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVino:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._handles: dict[int, tuple[Any, int]] = {}
        """OpenVINO's handle of each request, and the number of tokens that are still missing."""
        self._next_id = 0

    def add(self, number: int, token_ids: list[int], max_tokens: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(numpy.array([token_ids], dtype=numpy.int64))
        # OpenVINO rejects ids of earlier runs.
        self._next_id += 1
        self._handles[number] = (self._pipeline.add_request(self._next_id, ids, config), max_tokens)

    def step(self) -> Iterable[tuple[int, Sequence[int]]]:
        self._pipeline.step()
        came = []
        for number, (handle, left) in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            came.append((number, tokens))
            if len(tokens) < left:
                self._handles[number] = (handle, left - len(tokens))
            else:
                del self._handles[number]
        return came


def load(settings: Settings) -> Loaded:
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = max(1, settings["kv_bytes"] >> 30)
    scheduler.max_num_seqs = settings["max_num_seqs"]
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[settings["dtype"]],
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    if settings["kv_dtype"] is not None:
        properties["KV_CACHE_PRECISION"] = PRECISIONS[settings["kv_dtype"]]
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["converted"], scheduler, "CPU", properties)
    versions = {"openvino-genai": openvino_genai.__version__, "openvino": openvino.__version__}
    notes = f"KV cache in {settings['kv_dtype'] or 'its default, 8 bits'}"
    return stepped(OpenVino(pipeline), versions, notes)


if __name__ == "__main__":
    serve(load)
