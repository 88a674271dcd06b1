"""Converts a Hugging Face folder to an OpenVINO model in full precision, with optimum-intel.

Run it with the Python of an environment that has optimum-intel:

    python openvino_convert.py FOLDER INTO
"""

import sys
from pathlib import Path


def main(folder: str, into: str) -> None:
    from optimum.exporters.openvino import main_export

    main_export(folder, into, task="text-generation-with-past", local_files_only=True, convert_tokenizer=True)
    if not (Path(into) / "openvino_tokenizer.xml").exists():
        raise SystemExit("the tokenizer was not converted: openvino-tokenizers is missing")


if __name__ == "__main__":
    main(*sys.argv[1:])
