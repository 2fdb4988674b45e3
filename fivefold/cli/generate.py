"""`fivefold generate`: text from a model, once or in a conversation."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from fivefold.engines.serve.completion import Completion, Timings
    from fivefold.engines.serve.generate import Generator
    from fivefold.engines.serve.sampling_params import SamplingParams

EXAMPLES = """Examples:

    fivefold generate --prompt "The three primary colours are"

    fivefold generate --chat

    fivefold generate --chat --system "Answer in French." --prompt "Good morning!"

    fivefold generate --model path/to/folder --prompt "def main(" --temperature 0.8 --seed 1

    cat question.txt | fivefold generate --chat --prompt -

    fivefold generate --prompt one --prompt two --json
"""


def generate(
    model: str = typer.Option(
        "smollm2", help="Hugging Face folder, GGUF file, llama2.c file, run, checkpoint, `smollm2`."
    ),
    prompt: list[str] = typer.Option([], help="Text to continue; `-` reads it from stdin."),
    chat: bool = typer.Option(
        False, "--chat", help="Talk to the model; with --prompt, answer that through its template."
    ),
    system: str | None = typer.Option(None, help="System message of the conversation."),
    max_new_tokens: int = typer.Option(256, help="Tokens to produce at most."),
    temperature: float = typer.Option(0.0, help="0: the likeliest token, always the same answer."),
    top_k: int = typer.Option(0, help="Sample among the k likeliest tokens; 0: all."),
    top_p: float = typer.Option(1.0, help="Sample among tokens that make up this probability."),
    min_p: float = typer.Option(0.0, help="Drop tokens below this share of the likeliest's."),
    repetition_penalty: float = typer.Option(1.0, help="Above 1: what was said is less likely."),
    presence_penalty: float = typer.Option(0.0, help="Subtracted for tokens in the answer."),
    frequency_penalty: float = typer.Option(0.0, help="Subtracted for each time they are."),
    stop: list[str] = typer.Option([], help="String that ends the answer; may be repeated."),
    seed: int | None = typer.Option(None, help="Same seed, same answer."),
    dtype: Literal["auto", "fp32", "bf16"] = typer.Option(
        "auto", help="auto: bf16 where the device multiplies it natively, else fp32."
    ),
    device: str = typer.Option("auto", help="auto: a GPU where there is one; or e.g. cpu, cuda:1."),
    threads: int | None = typer.Option(None, min=1, help="CPU threads; default: torch's."),
    deterministic: bool = typer.Option(
        False, help="Kernels whose bits for a token are those of training, in any batch."
    ),
    as_json: bool = typer.Option(False, "--json", help="One JSON object per completion."),
    logprobs: int = typer.Option(0, help="With --json: also the n likeliest tokens at each step."),
) -> None:
    """Generate text from a model, streaming to the terminal."""
    from fivefold.core.errors import PromptError
    from fivefold.engines.serve.sampling_params import SamplingParams
    from fivefold.kernels.dispatch import set_deterministic

    params = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty, stop=stop, seed=seed,
        logprobs=logprobs if as_json else None,
    )  # fmt: skip
    if system is not None and not chat:
        raise PromptError("--system is part of a conversation", "add --chat")
    if as_json and chat and not prompt:
        raise PromptError("--json prints completions, not a conversation", "add --prompt TEXT")
    if params.greedy and (top_k, top_p, min_p) != (0, 1.0, 0.0):
        print("note: --top-k, --top-p and --min-p act with --temperature above 0", file=sys.stderr)
    texts = _texts(prompt, chat)
    set_deterministic(deterministic)
    generator = _load(model, dtype, device, threads)
    if not texts:
        from fivefold.cli.chat import converse

        converse(generator, params, system)
        return
    prompts = [_encode(generator, text, chat, system) for text in texts]
    if as_json:
        for completion in generator.generate(prompts, params):
            typer.echo(json.dumps(_record(completion), ensure_ascii=False))
    else:
        for ids in prompts:
            _stream(generator, ids, params)


generate.__doc__ = f"{generate.__doc__}\n\n{EXAMPLES}"


def _texts(prompts: list[str], chat: bool) -> list[str]:
    """The prompts with `-` read; none means a conversation."""
    from fivefold.core.errors import PromptError

    if not prompts and not chat:
        if sys.stdin.isatty():
            raise PromptError("there is no prompt", "give --prompt TEXT, or --chat")
        prompts = ["-"]
    if prompts.count("-") > 1:
        raise PromptError("--prompt - is given twice, but stdin is read once", "leave one out")
    return [_read_stdin() if text == "-" else text for text in prompts]


def _read_stdin() -> str:
    from fivefold.core.errors import PromptError

    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise PromptError(f"stdin is no UTF-8 text: byte {error.start}", "convert it") from None


def _load(model: str, dtype: str, device: str, threads: int | None) -> Generator:
    import torch

    from fivefold.engines.serve.generate import Generator
    from fivefold.engines.serve.placement import find_device, find_dtype
    from fivefold.weights.open import load_decoder, load_tokenizer

    if threads is not None:
        torch.set_num_threads(threads)
    where = find_device(device)
    chosen = find_dtype(dtype, where)
    tokenizer = load_tokenizer(model)
    return Generator(load_decoder(model, chosen, where), tokenizer)


def _encode(generator: Generator, text: str, chat: bool, system: str | None) -> list[int]:
    from fivefold.cli.chat import encode_conversation, opening

    assert generator.tokenizer is not None
    if not chat:
        return generator.tokenizer.encode(text)
    return encode_conversation(generator, [*opening(system), {"role": "user", "content": text}])


def _stream(generator: Generator, ids: list[int], params: SamplingParams) -> None:
    timings, reason = None, None
    for delta in generator.stream(ids, params):
        sys.stdout.write(delta.text)
        sys.stdout.flush()
        timings, reason = delta.timings, delta.finish_reason
    sys.stdout.write("\n")
    sys.stdout.flush()
    if timings is not None:
        print(describe(timings, reason), file=sys.stderr)


def describe(timings: Timings, reason: str | None) -> str:
    """One line about an answer's speed and end."""
    return (
        f"[{timings.completion_tokens} tokens, {timings.tokens_per_second:.1f} tokens/s, "
        f"first after {timings.ttft_seconds:.2f} s, end: {reason or 'stopped'}]"
    )


def _record(completion: Completion) -> dict[str, Any]:
    """The JSON object of one completion."""
    steps = completion.logprobs or []
    record: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "logprobs": [
            step[token].logprob for token, step in zip(completion.token_ids, steps, strict=True)
        ],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "seconds": round(completion.timings.seconds, 6),
        "tokens_per_second": round(completion.timings.tokens_per_second, 3),
        "ttft_seconds": round(completion.timings.ttft_seconds, 6),
    }
    if any(len(step) > 1 for step in steps):
        record["top_logprobs"] = [{t: found.logprob for t, found in step.items()} for step in steps]
    return record
