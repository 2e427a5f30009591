"""Teaches torch.compile about the operators. The one file that touches private parts of PyTorch's compiler."""
