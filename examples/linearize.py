"""Turns a small softmax Transformer into models with constant memories, stage by stage, on a laptop.

    python examples/linearize.py

A teacher of two layers learns to recall key-value pairs. Its attention becomes memories, in all layers or in all but one. Every
memory first learns what the attention in its place gave, and then the whole student what the teacher predicts. For models of text
`fastweights convert` and `fastweights distill` do the same (docs/linearize.md).
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.data import IGNORE_INDEX, MQAR
from fastweights.evaluation import recall_accuracy
from fastweights.models import linearize

TASK = MQAR(pairs=4, length=32, vocab_size=64)
CONFIG = LlamaConfig(
    vocab_size=TASK.vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
KEPT = ("none", "every:2")  # layers whose attention stays: none, and the last of two
CONTEXT = 1024  # tokens after which caches are compared
TESTED = 1024  # held-out sequences
STEPS = (500, 200, 300)  # of the teacher, of stage (a) and of stage (b)


def train(model, loss_of, steps, learning_rate):
    """Train on batches of the task, with a rate that rises and falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for index in range(steps):
        loss = loss_of(TASK.batch("train", seed=0, index=index, batch_size=64))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return recall_accuracy(model.eval(), TASK, seed=0, examples=TESTED)


def recall_loss(model, batch):
    """Of the values that are asked for: how the teacher learns."""
    logits_BTV = model(batch.input_ids, use_cache=False).logits
    return F.cross_entropy(logits_BTV.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX)


def attention_loss(teacher, student, batch):
    """Stage (a): of every memory, how far its outputs are from those of the attention in its place, on the teacher's inputs."""
    memories, seen = student.memory_layers(), {}

    def note(layer, module, args, kwargs, output):
        seen[layer] = kwargs["hidden_states"], output[0]

    attentions = {layer: teacher.model.layers[layer].self_attn for layer in memories}
    hooks = [one.register_forward_hook(partial(note, layer), with_kwargs=True) for layer, one in attentions.items()]
    with torch.no_grad():
        teacher(batch.input_ids, use_cache=False)  # one forward serves all layers
    for hook in hooks:
        hook.remove()
    losses = []
    for layer, memory in memories.items():
        x_BTD, wanted_BTD = seen[layer]
        rotation = student.model.rotary_emb(x_BTD, torch.arange(TASK.length)[None])
        output_BTD, _ = memory(x_BTD, position_embeddings=rotation)
        losses.append(F.mse_loss(output_BTD, wanted_BTD))
    return sum(losses)


def divergence(teacher, student, batch):
    """Stage (b): KL(teacher || student) of the next token, in nats per token."""
    with torch.no_grad():
        wanted_BTV = teacher(batch.input_ids, use_cache=False).logits.log_softmax(-1)
    predicted_BTV = student(batch.input_ids, use_cache=False).logits.log_softmax(-1)
    return F.kl_div(predicted_BTV, wanted_BTV, log_target=True, reduction="none").sum(-1).mean()


def main(arguments=None):
    """Print the table, and return its rows: a name, and a number per student."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="gdn", help="the mixer of the memories")
    parser.add_argument("--steps", type=int, nargs=3, default=STEPS, help="of the teacher, of (a) and of (b)")
    asked = parser.parse_args(arguments)
    of_teacher, of_memories, of_student = asked.steps
    torch.manual_seed(0)
    teacher = LlamaForCausalLM(CONFIG)
    accuracy = train(teacher, partial(recall_loss, teacher), of_teacher, 3e-3)
    teacher.requires_grad_(False)
    students = [linearize(teacher, to=asked.to, keep=keep) for keep in KEPT]
    print(f"{'attention kept':34}" + "".join(f"{keep:>10}" for keep in KEPT))
    rows = {"teacher": [accuracy] * len(KEPT)}
    rows["converted, not trained"] = [recall_accuracy(one.eval(), TASK, seed=0, examples=TESTED) for one in students]
    for name, loss, steps in (
        ("after (a), attention outputs", attention_loss, of_memories),
        ("after (b), predictions", divergence, of_student),
    ):
        rows[name] = [train(one, partial(loss, teacher, one), steps, 1e-3) for one in students]
    for name, values in rows.items():
        print(f"{name:34}" + "".join(f"{x:>10.3f}" for x in values))
    whole = linearize(teacher, to=asked.to, keep="all")
    sizes = {"teacher": [whole] * len(KEPT), "student": students}
    for name, models in sizes.items():
        row = f"cache after {CONTEXT:,} tokens, {name}"
        rows[row] = [one.state_size(CONTEXT) for one in models]
        print(f"{row:34}" + "".join(f"{x:>10,}" for x in rows[row]))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)  # tensors are so small that threads would only wait for each other
    main()
