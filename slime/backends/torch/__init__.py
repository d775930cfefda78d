"""The PyTorch backend: Hugging Face models, packed without padding, on CPU or one GPU.

Public: `trainer.TorchTrainer`. Nothing is imported here, so that naming the package does not load torch.
"""
