"""Loss, corpus, teacher and training against plain formulas and each other."""

from __future__ import annotations

import copy
import errno
import random
from typing import NamedTuple

import pytest
import torch

from dustin_trt.distillation import teacher as teacher_module
from dustin_trt.distillation import train
from dustin_trt.distillation.corpus import Corpus, frequent_tokens, make_corpus
from dustin_trt.distillation.loss import acceptance, distillation_loss
from dustin_trt.distillation.run import always_kept, spread
from dustin_trt.distillation.student import Student, cut_config
from dustin_trt.distillation.teacher import Teacher
from dustin_trt.distillation.train import Settings, Training, TrainingError
from tests import tiny, tokenizer


class Free(NamedTuple):
    """Of `shutil.disk_usage`, what is looked at."""

    free: int


TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"


def _hidden(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("hard", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_cross_entropy(hard):
    student, teacher, head = _hidden(5, 0).requires_grad_(), _hidden(5, 1), _hidden(11, 2)
    p = (teacher @ head.T).softmax(-1)
    wanted = (1 - hard) * p + hard * torch.nn.functional.one_hot(p.argmax(-1), 11)
    torch.nn.functional.cross_entropy(student @ head.T, wanted).backward()
    divergence, gradient = distillation_loss(student.detach(), teacher, head, hard=hard)
    torch.testing.assert_close(gradient, student.grad)
    expected = torch.nn.functional.kl_div(
        (student @ head.T).log_softmax(-1), p, reduction="batchmean"
    )
    assert divergence == pytest.approx(float(expected.detach()), rel=1e-5)


def test_acceptance_by_hand():
    # Hidden states are logits, with the unit matrix for a head. The student cannot say token 2.
    head, tokens = torch.eye(3), torch.tensor([0, 1])
    teacher = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]).log()
    student = torch.tensor([[0.6, 0.4, 9.0], [0.5, 0.5, 9.0]]).log()
    found = acceptance(student, teacher, head, tokens)
    # First: both say 0; min(.5,.6) + min(.3,.4) = .8. Second: the target says 2; .2 + .2 = .4.
    assert found.agreement == 0.5
    assert found.overlap == pytest.approx((0.8 + 0.4) / 2)


def test_texts_are_cut_and_the_rest_dropped():
    speaks = tokenizer.make()
    texts = ["abcdefghij" * 3, "xyz"]
    corpus = make_corpus(speaks, texts, context=8, retrieval_share=0, seed=0)
    assert corpus.sequences.tolist() == [
        speaks(texts[0]).input_ids[start : start + 8] for start in (0, 8, 16)
    ]
    with pytest.raises(ValueError, match="do not fill one sequence of 64"):
        make_corpus(speaks, texts, context=64, retrieval_share=0, seed=0)


def test_retrieval_prompts_carry_their_answer():
    speaks = tokenizer.make()
    chance = random.Random(0)
    text = " ".join(chance.choice(["the", "of", "and", "to"]) for _ in range(3000))
    with pytest.raises(ValueError, match="chat template"):
        make_corpus(speaks, [text], context=400, retrieval_share=0.5, seed=0)
    speaks.chat_template = TEMPLATE
    plain = make_corpus(speaks, [text], context=400, retrieval_share=0, seed=0)
    mixed = make_corpus(speaks, [text], context=400, retrieval_share=0.5, seed=0)
    assert len(mixed) == 2 * len(plain)
    for sequence in mixed.sequences[len(plain) :]:
        told = speaks.decode(sequence)
        key = told[-6:-1]
        assert key.isdigit() and told.endswith(f"The pass key is {key}.")
        assert told.count(key) == 3
    # What short texts cannot give, long ones do.
    uneven = make_corpus(speaks, ["of the", text], context=400, retrieval_share=0.5, seed=0)
    assert len(uneven) == len(mixed)
    with pytest.raises(ValueError, match="does not fit into 64 tokens"):
        make_corpus(speaks, [text], context=64, retrieval_share=0.5, seed=0)
    with pytest.raises(ValueError, match="no text is long enough"):
        # Enough tokens for a sequence, but most of them are white space, which haystacks lose.
        make_corpus(speaks, ["\n\n\n\n" * 400], context=400, retrieval_share=0.5, seed=0)


def test_frequent_tokens():
    corpus = Corpus(torch.tensor([[5, 5, 7], [7, 5, 9]]))
    assert frequent_tokens(corpus, 2, 12, ()).tolist() == [5, 7]
    # Token 11 is kept though it never occurs; 5 comes before 7 and 9, then the lowest id.
    assert frequent_tokens(corpus, 2, 12, (11,)).tolist() == [5, 11]
    assert frequent_tokens(corpus, 5, 12, ()).tolist() == [0, 1, 5, 7, 9]
    assert frequent_tokens(corpus, 99, 12, ()).tolist() == list(range(12))
    # A tokenizer can have tokens that its model has no rows for.
    assert frequent_tokens(corpus, 2, 12, (11, 12)).tolist() == [5, 11]


def test_order_is_a_shuffle_by_seed_and_epoch():
    corpus = Corpus(torch.zeros(20, 1, dtype=torch.long))
    first = corpus.order(0, 0)
    assert sorted(first) == list(range(20))
    assert first == corpus.order(0, 0)
    assert len({tuple(corpus.order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_layers_are_spread():
    assert spread(3, 30) == (0, 14, 29)
    assert spread(1, 30) == (0,)
    assert spread(2, 2) == (0, 1)
    with pytest.raises(ValueError, match="31 layers: the target has 30"):
        spread(31, 30)
    with pytest.raises(ValueError, match=r"no layers \[3\]"):
        cut_config(tiny.make("llama").config, [0, 3])


def test_always_kept_tokens_end_turns_and_count():
    speaks = tokenizer.make()
    speaks.chat_template = TEMPLATE
    kept = set(always_kept(speaks))
    assert {*speaks("[user][answer]0123456789").input_ids, 0, 1} <= kept


@pytest.fixture
def target():
    return tiny.make("llama", num_hidden_layers=3).requires_grad_(False)


@pytest.fixture
def corpora():
    # A language that can be learned: every token decides the next but for some noise.
    chance = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, tiny.VOCAB, (10,), generator=chance)]
    for _ in range(23):
        noise = torch.randint(1, tiny.VOCAB, (10,), generator=chance)
        follow = (rows[-1] * 7 + 3) % (tiny.VOCAB - 1) + 1
        rows.append(torch.where(torch.rand(10, generator=chance) < 0.2, noise, follow))
    sequences = torch.stack(rows, 1)
    return Corpus(sequences[:8]), Corpus(sequences[8:])


def _training(target, corpora, folder, **changes):
    settings = Settings(
        **{"layers": (0, 2), "vocabulary": 150, "steps": 6, "batch": 2, "warmup": 1,
           "evaluate_every": 3, "checkpoint_every": 3, **changes}
    )  # fmt: skip
    return Training(target, *corpora, folder, settings, always=(0,))


def test_the_student_starts_as_the_targets_layers(target):
    student = Student(target, (0, 1, 2), torch.arange(tiny.VOCAB))
    tokens = torch.tensor([tiny.prompt(12)])
    logits = student(tokens) @ student.head.T
    torch.testing.assert_close(logits, target(tokens).logits)
    assert not any("embed" in name for name in student.trained())


def test_the_teacher_is_asked_once(target, corpora, tmp_path, monkeypatch):
    sequences = corpora[0].sequences
    expected = target.model(sequences[[4, 1]]).last_hidden_state.bfloat16()
    teacher = Teacher(target, sequences, tmp_path)
    assert torch.equal(teacher.hidden([4, 1]), expected)
    again = Teacher(target, sequences, tmp_path)
    monkeypatch.setattr(again, "_inner", None)  # nothing may run
    again._inner = type("Silent", (), {"device": torch.device("cpu")})()
    assert torch.equal(again.hidden([1, 4]), expected.flip(0))


def test_what_was_said_of_other_texts_or_by_another_target_is_not_used(target, corpora, tmp_path):
    sequences = corpora[0].sequences
    Teacher(target, sequences, tmp_path).hidden([0])
    others = sequences.flip(0)
    for model, tokens in ((target, others), (tiny.make("llama", 1, num_hidden_layers=3), others)):
        expected = model.model(tokens[[0]]).last_hidden_state.bfloat16()
        assert torch.equal(Teacher(model, tokens, tmp_path).hidden([0]), expected)
    # A target in another dtype is the same target.
    low = copy.deepcopy(target).to(torch.bfloat16)
    assert Teacher(low, others, tmp_path).made_with == Teacher(target, others, tmp_path).made_with


def test_room_for_the_targets_hidden_states_is_asked_for_first(
    target, corpora, tmp_path, monkeypatch
):
    monkeypatch.setattr(teacher_module.shutil, "disk_usage", lambda folder: Free(1 << 20))
    with pytest.raises(OSError, match=r"hidden states .* need .* GiB .*fewer texts"):
        Teacher(target, corpora[0].sequences, tmp_path)


def test_training_learns(target, corpora, tmp_path):
    # A random target says nothing that carries over to other texts: it is judged on the same.
    same = corpora[0], corpora[0]
    training = _training(target, same, tmp_path, steps=60, learning_rate=3e-3)
    losses = []
    training.run(lambda now, loss: losses.append(loss))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert training.curve[-1].overlap > training.curve[0].overlap + 0.05
    assert training.curve[-1].agreement > training.curve[0].agreement + 0.1
    assert [point.step for point in training.curve] == list(range(0, 61, 3))
    assert training.curve[1].tokens == 3 * 2 * 24


def test_a_killed_training_goes_on_to_the_same_weights(target, corpora, tmp_path):
    whole = _training(target, corpora, tmp_path / "whole")
    whole.run()
    killed = _training(target, corpora, tmp_path / "killed")

    class Killed(BaseException):
        pass

    def kill(now, loss):
        if now.step == 5:  # two steps after the checkpoint
            raise Killed

    with pytest.raises(Killed):
        killed.run(kill)
    resumed = _training(target, corpora, tmp_path / "killed")
    assert resumed.resume() and resumed.step == 3
    resumed.run()
    for name, tensor in whole.student.trained().items():
        assert torch.equal(tensor, resumed.student.trained()[name]), name
    assert resumed.curve == whole.curve
    other = _training(target, corpora, tmp_path / "killed", hard=0.1)
    with pytest.raises(ValueError, match="made with another --hard: use the same"):
        other.resume()
    reversed_texts = Corpus(corpora[0].sequences.flip(0)), corpora[1]
    with pytest.raises(ValueError, match="made with another texts or target"):
        _training(target, reversed_texts, tmp_path / "killed").resume()


def test_a_training_that_is_stopped_ends_with_a_checkpoint(target, corpora, tmp_path):
    whole = _training(target, corpora, tmp_path / "whole")
    whole.run()
    stopped, saved = _training(target, corpora, tmp_path / "stopped"), []

    def stop(now, loss):
        now.stopping = now.step == 2

    stopped.run(stop, lambda now: saved.append(now.step))
    assert stopped.step == 2 and saved == [2]
    resumed = _training(target, corpora, tmp_path / "stopped")
    assert resumed.resume() and resumed.step == 2
    resumed.run()
    for name, tensor in whole.student.trained().items():
        assert torch.equal(tensor, resumed.student.trained()[name]), name
    assert resumed.curve == whole.curve


def test_a_full_disk_leaves_the_last_checkpoint(target, corpora, tmp_path, monkeypatch):
    training = _training(target, corpora, tmp_path)
    training.run()
    before = training.checkpoint.read_bytes()

    def full(state, stream):
        stream.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match=r"cannot write .*checkpoint\.pt.*make room"):
        training.save()
    assert training.checkpoint.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


def test_a_loss_that_is_not_finite_stops(target, corpora, tmp_path):
    broken = copy.deepcopy(target)
    training = _training(broken, corpora, tmp_path)
    with torch.no_grad():
        training.student.inner.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"loss of step 1 is nan.*lower --learning-rate"):
        training.run()


def test_a_gradient_that_is_not_finite_stops_before_the_weights(
    target, corpora, tmp_path, monkeypatch
):
    training = _training(target, corpora, tmp_path)
    before = {name: tensor.clone() for name, tensor in training.student.trained().items()}
    monkeypatch.setattr(
        train, "distillation_loss", lambda student, *_, **__: (1.0, student * float("inf"))
    )
    with pytest.raises(TrainingError, match="gradient of step 1 is nan"):
        training.run()
    assert all(torch.equal(before[n], t) for n, t in training.student.trained().items())


@pytest.mark.parametrize(
    ("field", "value"),
    [("steps", 0), ("batch", 0), ("evaluate_every", 0), ("checkpoint_every", -1),
     ("vocabulary", -1), ("warmup", -1), ("learning_rate", 0.0), ("learning_rate", float("nan")),
     ("hard", 1.5)],
)  # fmt: skip
def test_settings_that_make_no_sense_are_named(field, value):
    with pytest.raises(ValueError, match=f"--{field.replace('_', '-')} "):
        Settings(**{"layers": (0,), field: value})
