"""Single-stream generation with SmolLM2-135M: ours against transformers, same weights, one process.

    python benches/generate.py                   # fp32 and bf16, 128 tokens in, 128 out, greedy
    python benches/generate.py --dtype bf16 --rounds 3 --json

Each round times one answer of each side; the order alternates. `transformers` is its
`generate`, which users call; `forward loop` is its bare model with a DynamicCache and an argmax,
without generate's own work at each step. Weights are the real ones where `smollm2` is installed,
else random ones of its shape. The share of memory bandwidth counts the weights and the held
keys and values read for each token; the share of the GEMM peak is of reading the prompt.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SHAPE = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Answer:
    """Seconds to the first token, seconds of the tokens after it, and the tokens."""

    first: float
    rest: float
    tokens: list[int]


Side = Callable[[list[int], int], Answer]


def decoder_in(dtype: torch.dtype) -> Any:
    from fivefold.core.errors import MissingExtraError
    from fivefold.model.decoder import Decoder
    from fivefold.model.families import parse_config
    from fivefold.weights.open import load_decoder

    try:
        return load_decoder("smollm2", dtype)
    except MissingExtraError:
        decoder = Decoder(parse_config(SHAPE), dtype=dtype)
        decoder.initialize(0)
        return decoder


def ours(decoder: Any) -> Side:
    from fivefold.engines.serve.generate import Generator
    from fivefold.engines.serve.sampling_params import SamplingParams

    generator = Generator(decoder, None)

    def answer(prompt: list[int], count: int) -> Answer:
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        done = generator.generate([prompt], params)[0]
        times = done.timings
        return Answer(times.ttft_seconds, times.seconds - times.ttft_seconds, done.token_ids)

    return answer


def transformers_model(decoder: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    from fivefold.model.families import export_config, weight_names

    config = LlamaConfig(**export_config(decoder.config))
    model = LlamaForCausalLM(config).to(decoder.head_weight().dtype).eval()
    state = dict(decoder.named_parameters())
    names = weight_names(decoder.config)
    model.load_state_dict({names[k]: v.detach() for k, v in state.items()}, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


class Stopwatch:
    """A transformers streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def theirs(model: Any) -> Side:
    def answer(prompt: list[int], count: int) -> Answer:
        ids, watch = torch.tensor([prompt]), Stopwatch()
        started = time.perf_counter()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            streamer=watch,
        )  # fmt: skip
        # the first `put` is the prompt
        return Answer(
            watch.times[1] - started,
            watch.times[-1] - watch.times[1],
            out[0, len(prompt) :].tolist(),
        )

    return answer


def forward_loop(model: Any) -> Side:
    from transformers import DynamicCache

    @torch.inference_mode()
    def answer(prompt: list[int], count: int) -> Answer:
        cache, ids, tokens, times = (
            DynamicCache(config=model.config),
            torch.tensor([prompt]),
            [],
            [],
        )
        started = time.perf_counter()
        for _ in range(count):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
            times.append(time.perf_counter())
        return Answer(times[0] - started, times[-1] - times[0], tokens)

    return answer


def measure(arguments: argparse.Namespace, dtype: str) -> dict[str, Any]:
    from fivefold.observe.peak import measured_bandwidth, measured_peak

    decoder = decoder_in(FORMATS[dtype])
    model = transformers_model(decoder)
    sides = {
        "fivefold": ours(decoder),
        "transformers": theirs(model),
        "forward loop": forward_loop(model),
    }
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(
        0, SHAPE["vocab_size"], (arguments.prompt,), generator=generator
    ).tolist()
    answers: dict[str, list[Answer]] = {side: [] for side in sides}
    for index in range(arguments.rounds + 1):
        for side in list(sides) if index % 2 else list(sides)[::-1]:
            found = sides[side](prompt, arguments.tokens)
            if index:  # the first round warms up
                answers[side].append(found)
    peak, bandwidth = measured_peak("cpu", dtype), measured_bandwidth()
    read, flops = _bytes_a_token(decoder, arguments), _prompt_flops(decoder, arguments)
    rows = {}
    for side, found in answers.items():
        rates = [(arguments.tokens - 1) / a.rest for a in found]
        firsts = [a.first for a in found]
        rows[side] = {
            "tokens_per_second": statistics.median(rates),
            "spread": [min(rates), max(rates)],
            "ttft_seconds": statistics.median(firsts),
            "ttft_spread": [min(firsts), max(firsts)],
            "share_of_bandwidth": statistics.median(rates) * read / bandwidth.bytes_per_second,
            "share_of_gemm_peak": flops / statistics.median(firsts) / peak.flops_per_second,
            "same_tokens_as_fivefold": _agreement(answers["fivefold"][0], found[0]),
        }
    own = rows["fivefold"]["tokens_per_second"]
    return {
        "what": f"SmolLM2-135M, {arguments.prompt} in + {arguments.tokens} out, greedy, {dtype}",
        "threads": torch.get_num_threads(),
        "measured_on": peak.measured_on,
        "gemm_peak_gflops": peak.flops_per_second / 1e9,
        "bandwidth_gb_per_s": bandwidth.bytes_per_second / 1e9,
        "disturbed": peak.disturbed or bandwidth.disturbed,
        "bytes_a_token": read,
        "sides": rows,
        "decode_ratio": {
            s: own / r["tokens_per_second"] for s, r in rows.items() if s != "fivefold"
        },
        "ttft_ratio": {
            s: r["ttft_seconds"] / rows["fivefold"]["ttft_seconds"]
            for s, r in rows.items()
            if s != "fivefold"
        },
    }


def _bytes_a_token(decoder: Any, arguments: argparse.Namespace) -> float:
    """Weights once, and keys and values of the mean length, in the decoder's format."""
    weights = sum(p.numel() * p.element_size() for p in decoder.parameters())
    config = decoder.config
    mean_length = arguments.prompt + arguments.tokens / 2
    held = 2 * config.num_layers * config.num_kv_heads * config.head_dim * mean_length
    return weights + held * decoder.head_weight().element_size()


def _prompt_flops(decoder: Any, arguments: argparse.Namespace) -> float:
    """Products of the blocks for every prompt token; the head runs for the last one alone."""
    matrices = sum(
        p.numel() for layer in decoder.layers for p in layer.parameters() if p.dim() == 2
    )
    head = decoder.head_weight().numel()
    return 2.0 * (matrices * arguments.prompt + head)


def _agreement(a: Answer, b: Answer) -> int:
    """Tokens until the first that differs (near ties may part, in bf16 above all)."""
    pairs = enumerate(zip(a.tokens, b.tokens, strict=True))
    return next((i for i, (x, y) in pairs if x != y), len(a.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32", "both"), default="both")
    parser.add_argument("--prompt", type=int, default=128, help="tokens in")
    parser.add_argument("--tokens", type=int, default=128, help="tokens out")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    chosen = ("fp32", "bf16") if arguments.dtype == "both" else (arguments.dtype,)
    results = [measure(arguments, dtype) for dtype in chosen]
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    for found in results:
        show(found)


def show(found: dict[str, Any]) -> None:
    print(f"{found['what']}, {found['threads']} threads, {found['measured_on']}; GEMM peak "
          f"{found['gemm_peak_gflops']:.0f} GFLOP/s, memory {found['bandwidth_gb_per_s']:.1f} GB/s"
          f"{' (DISTURBED by other processes)' if found['disturbed'] else ''}")  # fmt: skip
    for side, row in found["sides"].items():
        low, high = row["spread"]
        print(f"  {side:<13} {row['tokens_per_second']:6.1f} tok/s ({low:.1f}-{high:.1f}), "
              f"{row['share_of_bandwidth']:.0%} of bandwidth; first token "
              f"{1e3 * row['ttft_seconds']:.0f} ms, {row['share_of_gemm_peak']:.0%} of GEMM peak; "
              f"{row['same_tokens_as_fivefold']} tokens as ours")  # fmt: skip
    for side in found["decode_ratio"]:
        print(f"  decode {found['decode_ratio'][side]:.2f}x, first token "
              f"{found['ttft_ratio'][side]:.2f}x {side}")  # fmt: skip


if __name__ == "__main__":
    main()
