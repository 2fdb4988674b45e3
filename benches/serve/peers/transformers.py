"""transformers' eager `generate`, all prompts as one batch."""

from __future__ import annotations

from peers.peer import Peer


class Transformers(Peer):
    """SDPA attention, a dynamic cache."""

    name = "transformers"
    module = "transformers"
    no_server = "its server is no engine for many at once"

    def load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(self.options.threads)
        form = {"bf16": torch.bfloat16, "fp32": torch.float32}[self.options.dtype]
        folder = str(self.options.folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=form).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def answer(self, prompts: list[list[int]], output: int) -> list[int]:
        import torch

        ids = torch.tensor(prompts)
        found = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=output
        )
        return [found.shape[1] - ids.shape[1]] * len(prompts)
