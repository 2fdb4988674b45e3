"""The command itself: its JSON, its streams, its errors, its conversation in a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fivefold.cli.main import main
from fivefold.text.tokenizer import Tokenizer
from fivefold.weights.save import save_huggingface
from tests.parity.small_models import build

COMMAND = [sys.executable, "-m", "fivefold", "generate"]
TEXT = ["Once upon a time there was a frog. user assistant system", "Why is the sky blue?\n"]


def make_model(folder: Path, *, chat: bool, **sizes: Any) -> Path:
    tokenizer = Tokenizer.train_bpe(iter(TEXT), 300)
    if not chat:
        tokenizer.chat = None
    ends = {"eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}
    _, decoder = build("llama", vocab_size=300, **ends, **sizes)
    save_huggingface(folder, decoder, decoder.config, tokenizer)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chatting"), chat=True, max_position_embeddings=4096)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *arguments])
    printed = capsys.readouterr()
    return int(exit_.value.code or 0), printed.out, printed.err


def test_json_has_one_object_a_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "--model", str(model), "--prompt", "Once upon", "--prompt", "Why", "--json",
        "--max-new-tokens", "6", "--logprobs", "2",
    )  # fmt: skip
    assert status == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert len(records) == 2
    for record in records:
        assert set(record) == {
            "text", "token_ids", "logprobs", "finish_reason", "stop_reason", "prompt_tokens",
            "completion_tokens", "seconds", "tokens_per_second", "ttft_seconds", "top_logprobs",
        }  # fmt: skip
        assert record["completion_tokens"] == len(record["token_ids"]) == len(record["logprobs"])
        assert all(value <= 0 for value in record["logprobs"])
        likeliest = record["top_logprobs"][0]
        assert likeliest[str(record["token_ids"][0])] == record["logprobs"][0]
        assert 0 < record["ttft_seconds"] <= record["seconds"]


def test_the_stream_is_the_json_text(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model", str(model), "--prompt", "Why is", "--max-new-tokens", "20",
             "--temperature", "0.9", "--top-p", "0.95", "--seed", "3"]  # fmt: skip
    _, streamed, note = run(capsys, *asked)
    _, record, _ = run(capsys, *asked, "--json")
    assert streamed == json.loads(record)["text"] + "\n"
    assert "tokens/s" in note


def test_chat_answers_once_through_the_template(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["--model", str(model), "--max-new-tokens", "5", "--json"]
    _, chat, _ = run(capsys, *shared, "--chat", "--system", "Be brief.", "--prompt", "Why?")
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    _, plain, _ = run(capsys, *shared, "--prompt", rendered)
    assert json.loads(chat)["token_ids"] == json.loads(plain)["token_ids"]
    assert json.loads(chat)["prompt_tokens"] == json.loads(plain)["prompt_tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0 is out of range"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "x", "--stop", ""], "empty stop string"),
        (["--prompt", "x", "--system", "y"], "--system is part of a conversation; add --chat"),
        (["--chat", "--json"], "--json prints completions"),
        (["--prompt", "-", "--prompt", "-"], "stdin is read once"),
        (["--prompt", "x", "--device", "gpu"], "no device 'gpu'"),
        (["--prompt", "x" * 9000], "but the model's context is 4096"),
    ],
)
def test_errors_are_one_line(
    model: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "--model", str(model), *arguments)
    assert status == 1
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_a_model_without_a_chat_template_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_model(tmp_path / "plain", chat=False)
    status, _, err = run(capsys, "--model", str(plain), "--chat", "--prompt", "x")
    assert status == 1
    assert "no chat template; leave out --chat" in err


def test_truncation_without_temperature_is_noted(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", str(model), "--prompt", "x", "--max-new-tokens", "1", "--top-k", "5"]
    status, _, err = run(capsys, *asked)
    assert status == 0
    assert "act with --temperature above 0" in err


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Let `data` stand in a pipe at stdin."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


def test_a_prompt_from_stdin(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--model", str(model), "--max-new-tokens", "4", "--json"]
    _, given, _ = run(capsys, *asked, "--prompt", "Why is")
    for arguments in (["--prompt", "-"], []):
        feed(monkeypatch, b"Why is\n")
        _, piped, _ = run(capsys, *asked, *arguments)
        assert json.loads(piped)["token_ids"] == json.loads(given)["token_ids"]
    feed(monkeypatch, b"ab\xff")
    status, _, err = run(capsys, *asked, "--prompt", "-")
    assert status == 1
    assert "stdin is no UTF-8 text: byte 2" in err


def test_a_piped_conversation_remembers_and_resets(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, b"one\ntwo\n/reset\none\n/exit\nnever\n")
    status, out, _ = run(capsys, "--model", str(model), "--chat", "--max-new-tokens", "8")
    assert status == 0
    first, second, again = split_answers(out, model, ["one", "two"], ["one"])
    assert again == first
    assert second


def split_answers(out: str, model: Path, *talks: list[str]) -> list[str]:
    """Check the output against answers computed here with the whole conversation, one by one."""
    from fivefold.engines.serve.generate import Generator
    from fivefold.engines.serve.sampling_params import SamplingParams
    from fivefold.weights.open import load_decoder, load_tokenizer

    tokenizer = load_tokenizer(model)
    assert tokenizer.chat is not None
    generator = Generator(load_decoder(model), tokenizer)
    answers = []
    for talk in talks:
        messages: list[dict[str, str]] = []
        for line in talk:
            messages.append({"role": "user", "content": line})
            ids = tokenizer.encode(tokenizer.chat.render(messages), add_special=False)
            done = generator.generate([ids], SamplingParams(max_new_tokens=8))[0]
            messages.append({"role": "assistant", "content": done.text})
            answers.append(done.text)
    assert out == "".join(answer + "\n" for answer in answers)
    return answers


class Terminal:
    """The command on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, preexec_fn=lambda: _take_terminal(slave),
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def wait_for(self, *texts: str, seconds: float = 60) -> None:
        """Read until one of `texts` has come; what came until then is dropped from `seen`."""
        deadline = time.monotonic() + seconds
        while not (found := [text for text in texts if text in self.seen]):
            left = deadline - time.monotonic()
            assert left > 0, f"none of {texts!r} in {self.seen[-500:]!r}"
            if select.select([self.master], [], [], left)[0]:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
        self.seen = self.seen[self.seen.index(found[0]) + len(found[0]) :]

    def wait_for_prompt(self) -> None:
        """Until it reads: a Ctrl-C between the prompt and the reading is seen with the next key."""
        self.wait_for("> ")
        process = psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.01)

    def close(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGKILL)
            os.close(self.master)


def _take_terminal(slave: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)


def make_endless_model(folder: Path) -> Path:
    """Says one of two letters forever: their rows of the head are opposite, all others zero."""
    tokenizer = Tokenizer.train_bpe(iter(TEXT), 300)
    _, decoder = build(
        "llama", vocab_size=300, eos_token_id=0, bos_token_id=None, pad_token_id=0,
        tie_word_embeddings=False, max_position_embeddings=65536,
    )  # fmt: skip
    first, second = (tokenizer.encode(letter, add_special=False)[0] for letter in "QZ")
    weight = decoder.head_weight().data
    row = weight[first].clone()
    weight.zero_()
    weight[first], weight[second] = row, -row
    save_huggingface(folder, decoder, decoder.config, tokenizer)
    return folder


def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(tmp_path: Path) -> None:
    model = make_endless_model(tmp_path / "endless")
    terminal = Terminal("--model", str(model), "--chat", "--max-new-tokens", "60000")
    terminal.wait_for("> ")
    terminal.type("Why is the sky blue?\n")
    terminal.wait_for("blue?")  # the echo
    terminal.wait_for("Q", "Z")  # the answer has begun, and would go on for a minute
    terminal.type("\x03")
    terminal.wait_for("end: stopped]")
    terminal.wait_for_prompt()
    terminal.type("\x03")  # at the prompt it only tells how to leave
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("/reset\n")
    terminal.wait_for("a new conversation")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_a_conversation_that_outgrows_the_context_goes_on_after_reset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = make_model(tmp_path / "small", chat=True, max_position_embeddings=128)
    feed(monkeypatch, "\n".join(["a", "word " * 200, "b", "/reset", "c"]).encode())
    status, out, err = run(capsys, "--model", str(small), "--chat", "--max-new-tokens", "4")
    assert status == 0
    assert "but the model's context is 128" in err
    assert "or /reset" in err
    assert len(out.splitlines()) >= 3


def test_help_is_quick_and_shows_examples() -> None:
    code = "import sys; from fivefold.cli.main import main\ntry: main(['generate', '--help'])\nfinally: print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'fivefold generate --prompt "The three primary colours are"' in shown.stdout
    assert shown.stdout.rstrip().endswith("False")
