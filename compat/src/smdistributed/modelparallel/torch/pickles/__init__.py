"""Files of `torch.save`, read without running what they name."""
