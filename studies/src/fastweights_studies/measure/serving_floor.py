"""What a decoding step takes in vLLM with a model of its own that has one layer: none of our code is in it.

    python -m fastweights_studies.measure.serving_floor
    python -m fastweights_studies.measure.serving_floor --launched --batches 1,64,256

Needs vLLM (docs/serving.md). The model is vLLM's Llama with one layer and the widths and vocabulary of a preset of ours, with
random weights in bfloat16. Times are those of serving_vllm.py, beside whose rows they are written:
studies/results/serving-vllm-<device>.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from fastweights.models.presets import preset
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import name_file, replace_rows
from fastweights_studies.measure.serving_bench import read_numbers
from fastweights_studies.measure.serving_vllm import FEW, LAUNCHED, Server, describe_form, make_serving_rows, step_ms
from fastweights_studies.places import RESULTS

NAME = "llama-of-vllm"
WIDTHS_OF = "gdn-340m"


def make_config() -> LlamaConfig:
    ours = preset(WIDTHS_OF)
    return LlamaConfig(
        vocab_size=ours.vocab_size, hidden_size=ours.hidden_size, intermediate_size=ours.hidden_size * 3,
        num_hidden_layers=1, num_attention_heads=ours.hidden_size // 64, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"], dtype="bfloat16",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=read_numbers, default="1,64,256")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the decoding")
    parser.add_argument("--tokens", type=int, default=128, help="that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--launched", action="store_true", help="no torch.compile: kernels as vLLM launches them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.set_defaults(layers=1, backend=None)  # of `describe_form`
    asked = parser.parse_args()
    device = find_gpu()
    path, origin = name_file(asked.results, "serving-vllm", device), describe(device)
    settings: dict[str, Any] = {"gpu_memory_utilization": asked.memory, "load_format": "dummy"}
    settings |= {"compilation_config": LAUNCHED} if asked.launched else {}
    with tempfile.TemporaryDirectory() as folder:
        make_config().save_pretrained(folder)
        server = Server(folder, max(asked.batches), asked.prompt + FEW + asked.tokens, settings, None)
        for batch in asked.batches:
            ms = step_ms(server.write, batch, asked.prompt, asked.tokens, asked.repeats)
            print(f"vLLM's Llama of one layer, {batch} sequences: {ms:.3f} ms per step", flush=True)
            values = {"step_ms": ms, "tokens_per_second": 1e3 * batch / ms}
            replace_rows(path, make_serving_rows(NAME, None, batch, asked.prompt, values, origin, describe_form(asked)))


if __name__ == "__main__":
    main()
