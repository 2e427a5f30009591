"""Tiny models of the transformers library, made from configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from models import MODELS

TOKENS = 41


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, TOKENS, (2, 10), generator=generator)


class FromTransformers(nn.Module):
    """Takes what ``batch`` makes and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.make()

    @staticmethod
    def make() -> nn.Module:
        raise NotImplementedError

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(**self.arguments(batch)).loss

    def arguments(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": batch, "labels": batch}

    batch = staticmethod(_tokens)


class HFLlama(FromTransformers):
    @staticmethod
    def make() -> nn.Module:
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=TOKENS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
            )
        )  # fmt: skip


class HFGPT2(FromTransformers):
    @staticmethod
    def make() -> nn.Module:
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=TOKENS, n_embd=16, n_layer=2, n_head=2, n_positions=32)
        )


class HFBert(FromTransformers):
    @staticmethod
    def make() -> nn.Module:
        return transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=TOKENS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
                max_position_embeddings=32,
            )
        )  # fmt: skip


class HFT5(FromTransformers):
    @staticmethod
    def make() -> nn.Module:
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
            )
        )  # fmt: skip


class HFViT(FromTransformers):
    @staticmethod
    def make() -> nn.Module:
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
                num_labels=5,
            )
        )  # fmt: skip

    def arguments(self, batch: torch.Tensor) -> dict[str, Any]:
        return {"pixel_values": batch, "labels": (batch.flatten(1).sum(1).abs() * 7).long() % 5}

    @staticmethod
    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(3, 3, 8, 8, generator=generator)


class HFMixtral(FromTransformers):
    @staticmethod
    def make() -> nn.Module:
        return transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                vocab_size=TOKENS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
                output_router_logits=False,
            )
        )  # fmt: skip


class HFLora(FromTransformers):
    """A frozen model with low-rank additions that are trained."""

    @staticmethod
    def make() -> nn.Module:
        model = HFGPT2.make()
        model.requires_grad_(False)
        for block in model.transformer.h:
            block.mlp = Lora(block.mlp, 16, 4)
        return model


class Lora(nn.Module):
    def __init__(self, inner: nn.Module, size: int, rank: int) -> None:
        super().__init__()
        self.inner = inner
        self.down, self.up = nn.Linear(size, rank, bias=False), nn.Linear(rank, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.up(self.down(x))


KINDS = {
    "hf-llama": HFLlama,
    "hf-gpt2": HFGPT2,
    "hf-bert": HFBert,
    "hf-t5": HFT5,
    "hf-vit": HFViT,
    "hf-mixtral": HFMixtral,
    "hf-lora": HFLora,
}
MODELS.update(KINDS)
