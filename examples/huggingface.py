"""Trains a model of the transformers library, made from a configuration, under any ZeRO stage.

    torchrun --nproc-per-node 2 examples/huggingface.py [--stage 3] [--steps 20]

Needs transformers (tests/requirements-transformers.txt). Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
import transformers

import deepcompile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=512, n_embd=128, n_layer=4, n_head=4, n_positions=64)
    )
    engine = deepcompile.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        {"zero_optimization": {"stage": options.stage}, "gradient_clipping": 1.0},
    )
    for step in range(options.steps):
        start = torch.randint(0, 512, (4, 1), generator=torch.Generator().manual_seed(100 * step + rank))
        tokens = (start + 7 * torch.arange(32)) % 512
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)
    if rank == 0:
        print(engine.explain())
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
