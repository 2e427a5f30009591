"""The documented examples of DeepSpeed's shared-memory interface, with ``deepspeed`` replaced in the Python calls alone.

Each function is one example; ``rank`` and the number of ranks are what the launcher would have set.
"""

from __future__ import annotations

import os

import torch

import deepcompile


def options(rank: int, world: int) -> None:
    # Initialize the SHM interface
    # Typically done internally by initialization
    deepcompile.init_distributed()
    # Option 1: Use through the communication API
    tensor = torch.randn(1024, 1024, dtype=torch.bfloat16)
    deepcompile.comm.inference_all_reduce(tensor)
    # Option 2: Call PyTorch operator directly
    result = torch.ops.deepspeed.inference_all_reduce(tensor)
    # Option 3: In-place variant (modifies tensor)
    torch.ops.deepspeed.inference_all_reduce_(tensor)
    assert torch.equal(result, tensor)

    # Works with torch.compile
    @torch.compile
    def my_inference_step(x):
        # Operator is fully functionalized for graph compilation
        return torch.ops.deepspeed.inference_all_reduce(x)

    assert torch.equal(my_inference_step(torch.ones(7)), torch.full((7,), float(world)))


def setup(rank: int, world: int) -> None:
    # Setup environment
    os.environ["LOCAL_SIZE"] = str(world)
    os.environ["MASTER_ADDR"] = "localhost"
    # Initialize
    deepcompile.init_distributed(rank=rank, world_size=world)


def out_of_place(rank: int, world: int) -> None:
    # Example 1: Out-of-place allreduce
    input_tensor = torch.randn(512, 512, dtype=torch.bfloat16)
    before = input_tensor.clone()
    output_tensor = torch.ops.deepspeed.inference_all_reduce(input_tensor)
    # input_tensor remains unchanged, output_tensor has reduced values
    assert torch.equal(input_tensor, before)
    deepcompile.comm.all_reduce(before)
    torch.testing.assert_close(output_tensor, before)


def in_place(rank: int, world: int) -> None:
    # Example 2: In-place allreduce (more efficient)
    tensor = torch.randn(1024, 1024, dtype=torch.bfloat16)
    expected = tensor.float()
    torch.ops.deepspeed.inference_all_reduce_(tensor)
    # tensor now contains the allreduced values
    deepcompile.comm.all_reduce(expected)
    torch.testing.assert_close(tensor, expected.bfloat16())


def compiled(rank: int, world: int) -> None:
    # Example 3: With torch.compile
    @torch.compile
    def inference_with_allreduce(activations):
        # Functionalization converts in-place to out-of-place automatically
        output = torch.ops.deepspeed.inference_all_reduce(activations)
        return output * 2.0

    compiled_fn = inference_with_allreduce
    activations = torch.randn(256, 256, dtype=torch.float32)
    result = compiled_fn(activations)
    assert torch.equal(result, torch.ops.deepspeed.inference_all_reduce(activations) * 2.0)


def in_a_module(rank: int, world: int) -> None:
    # Example 4: Mixed with standard PyTorch operations
    class DistributedInferenceLayer(torch.nn.Module):
        def __init__(self, hidden_size):
            super().__init__()
            self.linear = torch.nn.Linear(hidden_size, hidden_size)

        def forward(self, x):
            # Standard PyTorch operation
            x = self.linear(x)
            # SHM allreduce
            x = torch.ops.deepspeed.inference_all_reduce(x)
            return torch.relu(x)

    torch.set_default_dtype(torch.bfloat16)  # the example mixes types otherwise, which no Linear takes
    layer = DistributedInferenceLayer(512)
    output = layer(torch.randn(32, 512, dtype=torch.bfloat16))
    torch.set_default_dtype(torch.float32)
    assert output.shape == (32, 512) and (output >= 0).all()


def non_contiguous(rank: int, world: int) -> None:
    # Example 5: Handling non-contiguous tensors
    non_contiguous = torch.randn(128, 128).t()  # Transpose creates non-contiguous
    expected = non_contiguous.contiguous()
    # The caller's tensor holds the sum
    torch.ops.deepspeed.inference_all_reduce_(non_contiguous)
    deepcompile.comm.all_reduce(expected)
    torch.testing.assert_close(non_contiguous, expected)


def fallback(rank: int, world: int) -> None:
    # Example 6: Type checking and fallback
    def safe_allreduce(tensor):
        if tensor.dtype in [torch.bfloat16, torch.float16, torch.float32] and tensor.device.type == "cpu":
            return torch.ops.deepspeed.inference_all_reduce(tensor)
        # Fallback to standard communication
        return deepcompile.comm.all_reduce(tensor)

    assert torch.equal(safe_allreduce(torch.ones(5)), torch.full((5,), float(world)))
    numbers = torch.ones(5, dtype=torch.int64)
    safe_allreduce(numbers)
    assert torch.equal(numbers, torch.full((5,), world))


def everything(rank: int, world: int) -> None:
    setup(rank, world)
    for example in (options, out_of_place, in_place, compiled, in_a_module, non_contiguous, fallback):
        example(rank, world)
