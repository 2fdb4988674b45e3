"""OpenVINO GenAI."""

from __future__ import annotations

from peers.peer import Peer


class OpenVino(Peer):
    """Reads the Q4_1 file and computes with it as its plugin sees fit; several prompts as one batch."""

    name = "openvino"
    module = "openvino_genai"
    packages = ("openvino-genai==2026.4.1",)
    no_server = "its model server is a program of its own"

    def load(self) -> None:
        import openvino_genai

        hints = {"bf16": "bf16", "fp32": "f32"}
        self.pipeline = openvino_genai.LLMPipeline(
            str(self.options.gguf),
            "CPU",
            INFERENCE_NUM_THREADS=self.options.threads,
            INFERENCE_PRECISION_HINT=hints[self.options.dtype],
        )

    def answer(self, prompts: list[list[int]], output: int) -> list[int]:
        import numpy as np
        import openvino as ov
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        ids = ov.Tensor(np.array(prompts, np.int64))
        mask = ov.Tensor(np.ones((len(prompts), len(prompts[0])), np.int64))
        found = self.pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
        return [len(tokens) for tokens in found.tokens]
