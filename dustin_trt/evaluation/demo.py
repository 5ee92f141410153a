"""`dustin-trt demo`: plain, speculative and Dustin decoding of real text, side by side."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from dustin_trt.evaluation import assets, machine
from dustin_trt.evaluation.passkey import PassKeyPrompt, passkey_prompts
from dustin_trt.evaluation.reading_map import draw_reading_map
from dustin_trt.evaluation.side_by_side import (
    PARTS,
    decoding_figures,
    describe_difference,
    full_batch,
    prefill_once,
)
from dustin_trt.runtime.llm import LLM, Prompt
from dustin_trt.runtime.sampling_params import SamplingParams
from dustin_trt.runtime.sequence import RequestOutput
from dustin_trt.runtime.stats import RunStats

WINDOW = 512
"""History tokens that MagicDec's draft reads."""

# (book, tokens of the prompt): four to tell about, two with a pass key hidden in them.
TALES = (("hamlet", 2048), ("macbeth", 3072), ("othello", 4096), ("king_lear", 6000))
PASS_KEYS = (("coriolanus", 3584), ("winters_tale", 5120))


@dataclass
class Method:
    """One way to decode, and what its rounds gave."""

    name: str
    llm: LLM
    rounds: list[RunStats] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


def run_demo(
    output: Path,
    *,
    dtype: str = "auto",
    max_new_tokens: int = 64,
    budget: int | None = None,
    rounds: int = 3,
    console: Console | None = None,
) -> None:
    """Decode six long prompts in four ways; print and write a table and a picture.

    Plain; classic speculative decoding; MagicDec, whose draft reads a window of the history only;
    and Dustin as calibrated. All that draft use the same draft and as many tokens a step.

    Parameters
    ----------
    output : folder for `demo.json`, `demo.txt` and `tokens_read.png`
    dtype : "auto" is bfloat16 where the processor computes with it, else float32; float32 shows
        exactness, bfloat16 rounds differently whenever the number of tokens a pass differs
    max_new_tokens : tokens a prompt
    budget : k of Dustin; None takes the calibrated one
    rounds : timed rounds; the methods take turns and medians are shown
    """
    console = console or Console()
    if max_new_tokens < 2:
        raise ValueError("max_new_tokens must be at least 2: the first token comes from prefill")
    if dtype == "auto":
        dtype = machine.fastest_dtype()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {output}: {error.strerror}") from error
    model, books = assets.smollm2(), assets.books()
    draft, calibrated = assets.smollm2_pair()
    size = len(TALES) + len(PASS_KEYS)
    llm = LLM(
        model,
        draft,
        config=calibrated,
        policy="dustin",
        budget=budget,
        dtype=dtype,
        max_batch_size=size,
        record_selections=True,
    )
    methods = [
        Method("plain", llm.variant(draft="none", policy="dense")),
        Method("classic", llm.variant(policy="dense", draft_window=0)),
        Method(f"MagicDec {WINDOW}", llm.variant(policy="dense", draft_window=WINDOW)),
        Method(f"Dustin {llm.config.budget}", llm),
    ]
    prompts, keys = _prompts(llm.tokenizer, books)
    # Every method decodes as many tokens, so that their times compare; what is shown and judged
    # ends where the model ended it.
    params = SamplingParams(max_tokens=max_new_tokens, ignore_eos=True)
    lengths = ", ".join(str(len(tokens)) for tokens in prompts)
    console.print(
        f"SmolLM2-135M-Instruct in {dtype}; {size} prompts of {lengths} tokens from Shakespeare, "
        f"two with a pass key hidden in them; {max_new_tokens} new tokens each. Draft: three "
        f"layers distilled from it, {llm.gamma} tokens a step."
    )
    requests: list[Prompt] = [{"prompt_token_ids": tokens} for tokens in prompts]
    prefill_once(llm, requests, sum(map(len, prompts)), console)
    for turn in range(rounds):
        for method in methods:
            if turn == 0:
                console.print(Rule(method.name, align="left"))
                method.outputs = _stream_first(method.llm, requests, params, console)
            else:
                with console.status(f"round {turn + 1} of {rounds}: {method.name}"):
                    method.llm.generate(requests, params)
            method.rounds.append(method.llm.stats)
    _report(methods, llm, keys, output, console)
    picture = output / "tokens_read.png"
    key = max(keys.values(), key=lambda key: len(key.tokens))
    # The answer and no more: the model likes to ramble on.
    briefly = SamplingParams(max_tokens=16, stop=(".",))
    (answer,) = methods[-1].llm.generate({"prompt_token_ids": key.tokens}, briefly)
    tale = max(range(len(TALES)), key=lambda row: len(prompts[row]))
    draw_reading_map(
        picture,
        llm.tokenizer,
        key,
        answer,
        TALES[tale][0].replace("_", " ").title(),
        len(prompts[tale]),
        methods[-1].outputs[tale].selections,
    )
    console.print("\nWritten:")
    for path in (output / "demo.txt", output / "demo.json", picture):
        console.print(f"  {path}", soft_wrap=True)


def _prompts(
    tokenizer: Any, books: dict[str, Path]
) -> tuple[list[list[int]], dict[int, PassKeyPrompt]]:
    """Token prompts, and which of them hide a pass key."""
    prompts = []
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0\n\nTell me what happens in this part of the play."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    head, tail = (tokenizer(part, verbose=False).input_ids for part in turn.split("\0"))
    for book, length in TALES:
        text = books[book].read_text(encoding="utf-8")
        tokens = tokenizer(text, verbose=False).input_ids
        part = tokens[2000 : 2000 + length - len(head) - len(tail)]
        prompts.append(head + part + tail)
    keys = {}
    for seed, (book, length) in enumerate(PASS_KEYS):
        text = books[book].read_text(encoding="utf-8")
        (prompt,) = passkey_prompts(tokenizer, text, length=length, count=1, seed=seed)
        keys[len(prompts)] = prompt
        prompts.append(prompt.tokens)
    return prompts, keys


def _stream_first(
    llm: LLM, requests: list[Prompt], params: SamplingParams, console: Console
) -> list[RequestOutput]:
    """Decode everything, printing the first prompt's text as its steps commit it."""
    outputs: dict[int, RequestOutput] = {}
    ended = False
    for chunk in llm.stream(requests, params):
        if chunk.key == 0 and not (ended := ended or not llm.eos.isdisjoint(chunk.token_ids)):
            console.out(chunk.text, end="", highlight=False)
        if chunk.output:
            outputs[chunk.key] = chunk.output
    console.print()
    return [outputs[key] for key in range(len(requests))]


def _shown(llm: LLM, output: RequestOutput) -> str:
    """The text up to where the model itself ended it."""
    tokens = output.token_ids
    end = next((i for i, token in enumerate(tokens) if token in llm.eos), len(tokens))
    text: str = llm.tokenizer.decode(tokens[:end], skip_special_tokens=True)
    return text


def _report(
    methods: list[Method],
    llm: LLM,
    keys: dict[int, PassKeyPrompt],
    output: Path,
    console: Console,
) -> None:
    rows = [_row(method, methods, llm, keys) for method in methods]
    record = {"machine": machine.describe(), "dtype": str(llm.dtype), "methods": rows}
    (output / "demo.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    outputs = methods[0].outputs
    table = _table(rows, len(outputs), len(outputs[0].token_ids))
    console.print()
    console.print(table)
    with (output / "demo.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=80).print(table)


def _row(
    method: Method, methods: list[Method], llm: LLM, keys: dict[int, PassKeyPrompt]
) -> dict[str, Any]:
    """One method's figures: medians over rounds for times, the first round for the rest."""
    classic = methods[1].outputs  # full verification
    rates = [full_batch(m).tokens_per_second or 0.0 for m in method.rounds]
    plain = [full_batch(m).tokens_per_second or 1.0 for m in methods[0].rounds]
    return {
        "method": method.name,
        "tokens_per_second": statistics.median(rates),
        "tokens_per_second_by_round": rates,
        "speedup_over_plain": statistics.median(a / b for a, b in zip(rates, plain, strict=True)),
        **decoding_figures(method.llm, method.outputs, classic),
        "pass_keys_found": sum(
            key.found_in(_shown(llm, method.outputs[i])) for i, key in keys.items()
        ),
        "pass_keys": len(keys),
        "milliseconds_a_step": {
            part: statistics.median(
                1000 * full_batch(m).seconds[part] / full_batch(m).steps for m in method.rounds
            )
            for part in PARTS
        },
    }


def _table(rows: list[dict[str, Any]], prompts: int, new_tokens: int) -> Table:
    table = Table(
        title="Decoding side by side",
        caption=(
            f"Medians of the rounds, over the steps that all {prompts} prompts took part in; the "
            "prompts were cached before. τ: tokens a step and prompt. KV read: history tokens a "
            "verification pass reads; scoring: keys read to choose them; both over a full read. "
            "Coverage: share of the history score that was read. Differs from: the earliest new "
            f"token (of {new_tokens}) at which an output departs from the classic one. Dustin is "
            "lossy; the others differ by rounding only."
        ),
        caption_justify="left",
    )
    table.add_column("")
    for row in rows:
        table.add_column(row["method"], justify="right")
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "tokens/s": lambda row: f"{row['tokens_per_second']:.1f}",
        "× plain": lambda row: f"{row['speedup_over_plain']:.2f}",
        "τ": lambda row: f"{row['tau']:.2f}",
        "accepted": lambda row: _percent(row["acceptance_rate"]),
        "KV read": lambda row: _percent(row["kv_read_share"]),
        "scoring": lambda row: _percent(row["scoring_share"] or None),
        "coverage": lambda row: _percent(row["coverage"]),
        "differs from": lambda row: describe_difference(row["first_difference"]),
        "keys found": lambda row: f"{row['pass_keys_found']} of {row['pass_keys']}",
    }
    for name, cell in lines.items():
        table.add_row(name, *map(cell, rows))
    table.add_section()
    for part in PARTS:
        table.add_row(
            f"{part}, ms a step", *(f"{row['milliseconds_a_step'][part]:.0f}" for row in rows)
        )
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
