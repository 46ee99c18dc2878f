"""Time per token of assisted decoding by prompt lookup, beside decoding without drafts.

    python -m fastweights_studies.measure.drafts
    python -m fastweights_studies.measure.drafts --mixers gdn,kda --drafts 10,20

A model of 24 layers of width 1024 with random weights in bfloat16 and batch 1. Its output layer is set so that it repeats a text
of 64 tokens: nearly all drafts fit. A prompt of random tokens, where few fit, is timed too. Checked: the same tokens as without
drafts. Writes studies/results/drafts-<device>.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS

TASK = "drafts"
PERIOD, PROMPT, NEW = 64, 128, 256  # tokens
REPEATS = 3


@torch.no_grad()
def repeating_model(mixer: str) -> Any:
    """The next token follows from the last one alone, in a circle of PERIOD tokens."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer)).bfloat16().eval()
    model.lm_head.weight[:PERIOD].copy_(model.model.embed_tokens.weight[:PERIOD].roll(1, 0))
    for name, weight in model.model.layers.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weight.mul_(1e-3)
    return model


def make_texts(vocabulary: int) -> dict[str, list[int]]:
    """Prompts: one that the model goes on with as it began, and one of random tokens."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "repeating": list(range(PERIOD)) * (PROMPT // PERIOD),
        "random": torch.randint(PERIOD, vocabulary - 1, (PROMPT,), generator=drawn).tolist(),
    }


def token_ms(model: Any, ids: Tensor, drafts: int) -> tuple[float, Tensor]:
    """Milliseconds per token, and the tokens."""
    options: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": model.config.vocab_size - 1}
    options |= {"prompt_lookup_num_tokens": drafts} if drafts else {}
    times = []
    for _ in range(REPEATS + 1):  # the first captures graphs
        torch.cuda.synchronize()
        begin = time.perf_counter()
        written = model.generate(ids, **options)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[1:]) / NEW, written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="gdn")
    parser.add_argument("--drafts", default="10,20", help="drafted tokens of a call")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = find_gpu()
    path, origin = name_file(asked.results, "drafts", device), describe(device)
    for mixer in asked.mixers.split(","):
        model = repeating_model(mixer)
        for text, prompt in make_texts(model.config.vocab_size).items():
            ids = torch.tensor([prompt], device="cuda")
            plain, wanted = token_ms(model, ids, 0)
            for drafts in map(int, asked.drafts.split(",")):
                ms, written = token_ms(model, ids, drafts)
                same = torch.equal(written, wanted)
                values: dict[str, Value] = {"token_ms": ms, "plain_token_ms": plain, "same_tokens": same}
                column = {"text": text, "drafts": drafts, "tokens": NEW}
                replace_rows(path, make_rows(TASK, origin, values, mixer=mixer, column=column))
                print(
                    f"{mixer}, {text} text, drafts of {drafts}: {ms:.3f} ms per token, {plain:.3f} without drafts: "
                    f"{plain / ms:.2f} times as fast; same tokens: {same}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
