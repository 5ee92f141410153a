import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from dustin_trt.runtime import batch_output
from dustin_trt.runtime.batch import BatchError, run_batch
from dustin_trt.runtime.batch_input import mix_seed
from dustin_trt.runtime.llm import LLM
from dustin_trt.runtime.sampling_params import SamplingParams
from tests import tiny
from tests import tokenizer as tiny_tokenizer

NAN_TOKEN = 299
"""Its embedding is NaN in the fixture's model."""
DEFAULTS = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
TEXTS = ("the thing and the other", "of an end", "日本 is here", "to be or not", "all that")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = tiny_tokenizer.model(num_hidden_layers=2, eos_token_id=0)
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = float("nan")
        model.lm_head.weight[NAN_TOKEN] = 0  # and nothing else leads to it
    model.save_pretrained(folder)
    tiny_tokenizer.make().save_pretrained(folder)
    return folder


def make_llm(folder):
    return LLM(folder, draft="skip:0", budget=24, gamma=2, max_batch_size=3, max_model_len=200)


@pytest.fixture(scope="module")
def llm(folder):
    return make_llm(folder)


def write(path, *lines):
    """Lines as given where they are text, as JSON otherwise."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    return path


def read(path):
    """Output lines by id, each of which must be there once, and without what a clock says."""
    data = path.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    lines = [json.loads(line) for line in data.splitlines()]
    for line in lines:
        for name in ("prefill_seconds", "decode_seconds", "cached_prompt_tokens"):
            line.get("stats", {}).pop(name, None)  # what a slot held before is chance as well
    by_id = {line["id"]: line for line in lines}
    assert len(by_id) == len(lines)
    return by_id


def job_lines(count=9):
    return [
        {"id": f"r{i}", "prompt": TEXTS[i % len(TEXTS)], "max_tokens": 6 + 5 * (i % 4)}
        for i in range(count)
    ]


def errors(llm, tmp_path, *lines):
    """The output of lines of which a good one is first and last."""
    good = [{"id": name, "prompt": TEXTS[0]} for name in ("first", "last")]
    source = write(tmp_path / "in.jsonl", good[0], *lines, good[1])
    summary = run_batch(llm, source, tmp_path / "out.jsonl", DEFAULTS)
    output = read(tmp_path / "out.jsonl")
    for name in ("first", "last"):
        assert len(output.pop(name)["token_ids"]) == 12
    assert summary.done == 2 and summary.failed == len(output)
    for line in output.values():
        assert line.keys() == {"id", "error"} and "\n" not in line["error"]
    return {id: line["error"] for id, line in output.items()}


def test_output_lines_hold_what_generate_returns(llm, tmp_path):
    params = SamplingParams(max_tokens=9)
    source = write(
        tmp_path / "in.jsonl",
        {"id": "text", "prompt": TEXTS[0]},
        {"id": 7, "prompt_token_ids": tiny.prompt(40)},
    )
    summary = run_batch(llm, source, tmp_path / "out.jsonl", params)
    output = read(tmp_path / "out.jsonl")
    expected = llm.generate([TEXTS[0], {"prompt_token_ids": tiny.prompt(40)}], params)
    for id, one in zip(("text", 7), expected, strict=True):
        line = output[id]
        assert line.keys() == {"id", "text", "token_ids", "finish_reason", "stats"}
        assert line["text"] == one.text and line["token_ids"] == one.token_ids
        assert line["finish_reason"] == one.finish_reason
        assert line["stats"]["policy"] == "dustin"
        assert line["stats"]["budget"] == 24 and line["stats"]["gamma"] == 2
        assert line["stats"]["steps"] == one.stats.steps
    assert (summary.total, summary.done, summary.failed, summary.skipped) == (2, 2, 0, 0)
    assert summary.tokens == sum(len(one.token_ids) for one in expected)
    assert summary.steps == sum(one.stats.steps for one in expected)
    assert summary.step_tokens == sum(one.stats.step_tokens for one in expected)
    assert summary.tau == summary.step_tokens / summary.steps
    assert summary.tokens_per_second > 0


def test_settings_that_play_no_part_are_null(llm, tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "the"})
    plain = llm.variant(draft="none", policy="dense")
    run_batch(plain, source, tmp_path / "out.jsonl", SamplingParams(max_tokens=2))
    stats = read(tmp_path / "out.jsonl")["1"]["stats"]
    assert (stats["policy"], stats["budget"], stats["gamma"]) == ("dense", None, None)


def test_a_line_brings_its_own_parameters(llm, tmp_path):
    greedy = llm.generate(TEXTS[0], SamplingParams(max_tokens=20))[0]
    stop = greedy.text[3:6]
    source = write(
        tmp_path / "in.jsonl",
        {"id": "default", "prompt": TEXTS[0]},
        {"id": "longer", "prompt": TEXTS[0], "max_tokens": 20, "top_k": 1},
        {"id": "stop", "prompt": TEXTS[0], "max_tokens": 20, "temperature": 0, "stop": stop},
        {"id": "token", "prompt": TEXTS[0], "temperature": 0, "top_p": 1,
         "stop_token_ids": [greedy.token_ids[2]], "ignore_eos": True},
        {"id": "null", "prompt": TEXTS[0], "prompt_token_ids": None, "max_tokens": None},
    )  # fmt: skip
    run_batch(llm, source, tmp_path / "out.jsonl", SamplingParams(max_tokens=4))
    output = read(tmp_path / "out.jsonl")
    assert output["default"]["token_ids"] == output["null"]["token_ids"] == greedy.token_ids[:4]
    assert output["longer"]["token_ids"] == greedy.token_ids
    assert output["stop"]["text"] == greedy.text[: greedy.text.index(stop)]
    assert output["token"]["token_ids"] == greedy.token_ids[:3]
    assert output["token"]["finish_reason"] == "stop"


def test_ids_default_to_line_numbers_and_blank_lines_are_none(llm, tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt": "the"}, "", "  ", {"prompt": "end"})
    summary = run_batch(llm, source, tmp_path / "out.jsonl", SamplingParams(max_tokens=2))
    assert read(tmp_path / "out.jsonl").keys() == {"1", "4"}
    assert summary.total == 2


def test_an_integer_and_its_digits_are_two_ids(llm, tmp_path):
    source = write(tmp_path / "in.jsonl", {"id": 1, "prompt": "the"}, {"id": "1", "prompt": "the"})
    assert run_batch(llm, source, tmp_path / "out.jsonl", DEFAULTS).done == 2
    assert mix_seed(0, 1) != mix_seed(0, "1")
    assert run_batch(llm, source, tmp_path / "out.jsonl", DEFAULTS).skipped == 2


def test_a_default_seed_is_mixed_with_the_id_and_an_own_seed_is_not(llm, tmp_path):
    lines = [{"id": f"mixed {i}", "prompt": TEXTS[0]} for i in range(3)]
    lines += [{"id": f"own {i}", "prompt": TEXTS[0], "seed": 5} for i in range(2)]
    run_batch(llm, write(tmp_path / "a.jsonl", *lines), tmp_path / "a.out", DEFAULTS)
    run_batch(llm, write(tmp_path / "b.jsonl", *lines[::-1]), tmp_path / "b.out", DEFAULTS)
    output = read(tmp_path / "a.out")
    assert output == read(tmp_path / "b.out")
    assert len({tuple(output[f"mixed {i}"]["token_ids"]) for i in range(3)}) == 3
    direct = llm.generate(TEXTS[0], DEFAULTS)[0].token_ids
    assert output["own 0"]["token_ids"] == output["own 1"]["token_ids"] == direct
    # Files written today must be continued by tomorrow's version.
    assert mix_seed(5, "mixed 0") == 8455622615900670593


def test_input_is_read_as_slots_become_free(llm, tmp_path):
    count = 40
    source = tmp_path / "in.fifo"
    os.mkfifo(source)
    writer = os.fork()
    if writer == 0:
        # The rest of the input comes only after the first line of output.
        with source.open("w") as file:
            for i in range(count):
                file.write(json.dumps({"prompt": TEXTS[i % 5], "max_tokens": 3}) + "\n")
                file.flush()
                while i >= 10 and not (tmp_path / "out.jsonl").stat().st_size:
                    time.sleep(0.01)
        os._exit(0)
    summary = run_batch(llm, source, tmp_path / "out.jsonl", SamplingParams())
    os.waitpid(writer, 0)
    assert summary.total is None and summary.done == count
    assert read(tmp_path / "out.jsonl").keys() == {str(i + 1) for i in range(count)}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"id": "x", "prompt": "the"', "the line is not JSON: Expecting ',' delimiter"),
        ("the", "the line is not JSON"),
        ("[1]", "not a JSON object"),
        ('"text"', "not a JSON object"),
        ('{"prompt": "\\ud800"}', "not UTF-8"),
        ('{"prompt": "the", "temperature": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "not JSON that can be read"),
        ({"id": 1.5, "prompt": "the"}, "id must be a string or an integer"),
        ({"id": True, "prompt": "the"}, "id must be a string or an integer"),
        ({"id": ["a"], "prompt": "the"}, "id must be a string or an integer"),
        ({"id": "line 9", "prompt": "the"}, "kept for errors"),
        ({"id": "first", "prompt": "the"}, "'first' is that of an earlier line"),
    ],
)
def test_a_line_without_a_usable_id_fails_under_its_number(llm, tmp_path, line, says):
    found = errors(llm, tmp_path, line)
    assert found.keys() == {"line 2"}
    assert says in found["line 2"]


def test_bytes_that_are_not_utf_8_fail_alone(llm, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "\xff"}\n\xef\xbb\xbf{"prompt": "the"}')
    run_batch(llm, source, tmp_path / "out.jsonl", SamplingParams(max_tokens=2))
    output = read(tmp_path / "out.jsonl")
    assert output["line 1"]["error"] == "the line is not UTF-8 text"
    assert output["2"]["finish_reason"] == "length"  # a byte-order mark is no harm


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "neither prompt nor prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "both prompt and prompt_token_ids"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt": 5}, "prompt must be a string"),
        ({"prompt": ["a"]}, "prompt must be a string"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": [1, 2.0]}, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": [5, 300]}, "token id 300 is not in the vocabulary of 300"),
        ({"prompt_token_ids": [-1]}, "token id -1"),
        ({"prompt_token_ids": [5] * 190}, "190 prompt tokens and max_tokens 12 are 202"),
        ({"prompt": "a", "max_tokens": 200}, "lower max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens: Input should be greater"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens must be an integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens must be an integer"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "temperature": -1}, "temperature: Input should be greater"),
        ({"prompt": "a", "top_p": 0}, "top_p: Input should be greater"),
        ({"prompt": "a", "top_k": 2**63}, "top_k: Input should be less"),
        ({"prompt": "a", "seed": -1}, "seed: Input should be greater"),
        ({"prompt": "a", "stop": 5}, "stop must be a string or a list of strings"),
        ({"prompt": "a", "stop": [""]}, "a stop string must not be empty"),
        ({"prompt": "a", "stop_token_ids": 5}, "stop_token_ids must be a list of integers"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"prompt": "a", "max_new_tokens": 5}, "unknown field 'max_new_tokens'; there are id, "),
        ({"prompt_token_ids": [5, NAN_TOKEN]}, "non-finite logits, first in embedding"),
    ],
)
def test_a_line_that_cannot_be_served_fails_alone(llm, tmp_path, fields, says):
    found = errors(llm, tmp_path, {"id": "bad", **fields}, fields)
    assert found.keys() == {"bad", "3"}
    assert says in found["bad"] and says in found["3"]


def test_errors_are_not_done_again_nor_doubled(llm, tmp_path):
    lines = [
        {"id": "a", "prompt": "the"}, "nothing", {"id": "a", "prompt": "end"},
        {"id": "b", "prompt": ""}, {"id": "b", "prompt": "end"}, {"prompt_token_ids": [NAN_TOKEN]},
    ]  # fmt: skip
    source, output = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    summary = run_batch(llm, source, output, DEFAULTS)
    assert (summary.done, summary.failed) == (1, 5)
    once = output.read_bytes()
    assert read(output).keys() == {"a", "line 2", "line 3", "b", "line 5", "6"}
    summary = run_batch(llm, source, output, DEFAULTS)
    assert (summary.done, summary.failed, summary.skipped, summary.skipped_failed) == (0, 0, 6, 5)
    assert output.read_bytes() == once


@pytest.fixture(scope="module")
def undisturbed(llm, tmp_path_factory):
    """What a job that nobody disturbs writes, and its input."""
    folder = tmp_path_factory.mktemp("undisturbed")
    source = write(folder / "in.jsonl", *job_lines(), "malformed", {"id": "empty", "prompt": ""})
    run_batch(llm, source, folder / "out.jsonl", DEFAULTS)
    return source, folder / "out.jsonl"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.6, 0.8, 0.99, 1.0])
def test_a_torn_line_is_cut_off_and_done_again(llm, tmp_path, undisturbed, share):
    source, complete = undisturbed
    data = complete.read_bytes()
    torn = tmp_path / "out.jsonl"
    torn.write_bytes(data[: round(len(data) * share)])
    kept = torn.read_bytes().count(b"\n")
    summary = run_batch(llm, source, torn, DEFAULTS)
    assert summary.skipped == kept and summary.finished == 11
    assert read(torn) == read(complete)


@pytest.mark.parametrize("cut", [1, 2, 9, 30])
def test_a_line_may_be_torn_anywhere(llm, tmp_path, undisturbed, cut):
    source, complete = undisturbed
    first, second = complete.read_bytes().splitlines(keepends=True)[:2]
    torn = tmp_path / "out.jsonl"
    for last in (second[:cut], second[:-cut]):
        torn.write_bytes(first + last)
        assert run_batch(llm, source, torn, DEFAULTS).skipped == 1
        assert read(torn) == read(complete)


SLOW_JOB = """
import sys, time, torch
torch.set_num_threads(1)
from tests.runtime.test_batch import DEFAULTS, make_llm
from dustin_trt.runtime.batch import run_batch
folder, source, output = sys.argv[1:]
run_batch(make_llm(folder), source, output, DEFAULTS, progress=lambda _: time.sleep(0.01))
"""


def test_a_killed_job_goes_on_where_it_was(llm, folder, tmp_path, undisturbed):
    source, complete = undisturbed
    output = tmp_path / "out.jsonl"
    total = 11
    for wanted in (1, 6):
        command = [sys.executable, "-c", SLOW_JOB, str(folder), str(source), str(output)]
        with subprocess.Popen(command) as job:
            while job.poll() is None:
                if output.exists() and output.read_bytes().count(b"\n") >= wanted:
                    break
                time.sleep(0.002)
            job.kill()
        assert job.returncode == -signal.SIGKILL
        assert wanted <= output.read_bytes().count(b"\n") < total
    summary = run_batch(llm, source, output, DEFAULTS)
    assert 6 <= summary.skipped < total == summary.finished
    assert read(output) == read(complete)


def test_ctrl_c_keeps_what_is_finished(llm, tmp_path, undisturbed):
    source, complete = undisturbed
    output = tmp_path / "out.jsonl"

    def press(summary):
        if summary.done == 3:
            signal.raise_signal(signal.SIGINT)

    summary = run_batch(llm, source, output, DEFAULTS, progress=press)
    assert summary.interrupted and summary.done == len(read(output)) - summary.failed == 3
    summary = run_batch(llm, source, output, DEFAULTS)  # the slots are free again
    assert not summary.interrupted and summary.finished == 11
    assert read(output) == read(complete)


@pytest.mark.parametrize("written", [0, 20])
def test_a_full_disk_leaves_whole_lines(llm, tmp_path, undisturbed, monkeypatch, written):
    source, complete = undisturbed
    output = tmp_path / "out.jsonl"
    real, calls = os.pwrite, []

    def pwrite(fd, data, offset):
        calls.append(offset)
        if len(calls) <= 2:
            return real(fd, data, offset)
        if len(calls) == 3 and written:
            return real(fd, data[:written], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_output.os, "pwrite", pwrite)
    with pytest.raises(BatchError, match=r"No space left on device; every finished line is saved"):
        run_batch(llm, source, output, DEFAULTS)
    monkeypatch.undo()
    assert len(read(output)) == 2
    assert run_batch(llm, source, output, DEFAULTS).skipped == 2
    assert read(output) == read(complete)


def test_output_of_something_else_is_left_alone(llm, tmp_path):
    source, output = write(tmp_path / "in.jsonl", {"prompt": "the"}), tmp_path / "out"
    for foreign in (
        "notes",
        '{"id": "a", "prompt": "b"}',
        '{"id": "a", "error": "b"}\nnotes',
        "[]\n",
    ):
        output.write_text(foreign)
        with pytest.raises(BatchError, match="holds something else than the output of a batch job"):
            run_batch(llm, source, output)
        assert output.read_text() == foreign


@pytest.mark.parametrize(
    ("input", "output", "says"),
    [
        ("missing", "out", "there is no input file"),
        (".", "out", "is not a file that can be read"),
        ("in", ".", "is not a regular file"),
        ("in", "none/out", "there is no folder"),
        ("in", "in", "are the same file"),
    ],
)
def test_files_that_cannot_be_used_are_refused(llm, tmp_path, input, output, says):
    write(tmp_path / "in", {"prompt": "the"})
    with pytest.raises(BatchError, match=says):
        run_batch(llm, tmp_path / input, tmp_path / output)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_two_jobs_do_not_write_one_file(llm, tmp_path):
    source, output = write(tmp_path / "in.jsonl", {"prompt": "the"}), tmp_path / "out.jsonl"
    with batch_output.OutputFile(output), pytest.raises(BatchError, match="another job"):
        run_batch(llm, source, output)
    assert run_batch(llm, source, output, SamplingParams(max_tokens=2)).done == 1


def test_progress_shows_prefill_and_decoding(llm, tmp_path, undisturbed):
    source, _ = undisturbed
    prefills, finished = [], []

    def watch(summary):
        prefills.append(summary.prefill)
        finished.append(summary.finished)

    before = llm.decoder.on_prefill
    run_batch(llm, source, tmp_path / "out.jsonl", DEFAULTS, progress=watch)
    assert llm.decoder.on_prefill is before
    assert any(prefill and prefill[0] == prefill[1] for prefill in prefills)
    assert finished == sorted(finished) and finished[-1] == 11
