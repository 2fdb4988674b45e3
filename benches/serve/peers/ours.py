"""fivefold itself."""

from __future__ import annotations

from peers.peer import Options, Peer


class Fivefold(Peer):
    """`fivefold.LLM` and `fivefold serve`."""

    name = "fivefold"
    module = "fivefold"

    def load(self) -> None:
        import torch

        from fivefold import LLM

        torch.set_num_threads(self.options.threads)
        self.llm = LLM(str(self.options.folder), dtype=self.options.dtype, device="cpu")

    def answer(self, prompts: list[list[int]], output: int) -> list[int]:
        from fivefold import SamplingParams

        params = SamplingParams(max_new_tokens=output, ignore_eos=True)
        return [len(a.token_ids) for a in self.llm.generate(prompts, params, progress=False)]

    @staticmethod
    def server(options: Options, python: str, port: int) -> list[str]:
        return [
            python, "-m", "fivefold", "serve", "--model", str(options.folder), "--port", str(port),
            "--dtype", options.dtype, "--threads", str(options.threads), "--device", "cpu",
        ]  # fmt: skip
