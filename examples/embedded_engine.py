"""Run the engine without a server, Redis or Ray: python examples/embedded_engine.py [MODEL]

MODEL is a folder in Hugging Face format. The default is the small demo model.
"""

import sys

from blockyard.deploy.settings.options import model_path
from blockyard.worker.llm import LLM, SamplingParams

model = LLM(
    model_path(sys.argv[1] if len(sys.argv) > 1 else "demo"), device="cpu", kv_cache_memory=32 * 2**20
)
system = "# Small helpers for reading files, each with a docstring and no dependencies.\n"
names = ("read_lines", "read_json", "count_words")

# All prompts run together. Their common beginning is computed once, and the second call reuses it.
for round_number in (1, 2):
    answers = model.generate(
        [f"{system}def {name}(path):" for name in names], SamplingParams(max_tokens=32, temperature=0.0)
    )
    cached = sum(answer.cached_tokens for answer in answers)
    print(
        f"round {round_number}: {cached} of {sum(answer.prompt_tokens for answer in answers)} tokens cached"
    )

for name, answer in zip(names, answers, strict=True):
    print(f"--- def {name}(path):{answer.outputs[0].text}")
