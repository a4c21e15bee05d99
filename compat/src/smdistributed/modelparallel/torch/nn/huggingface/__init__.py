"""What is known of Hugging Face's models: translators of the names of their states."""

from smdistributed.modelparallel.torch.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta

__all__ = ["bert", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]
