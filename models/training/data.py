"""Questions and answers, the byte-level BPE tokenizer, varied questions and length-sorted batches."""

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BEGIN, END, PAD, SYSTEM, USER, ASSISTANT]

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are Hearth's demo model.",
    "Answer briefly.",
    "You are a concise assistant for home clusters.",
    "Be helpful and truthful.",
    "You answer questions about Kubernetes and language models.",
    "Reply in a friendly tone.",
    "You are an expert on computers. Keep your answers short.",
    "Answer in one or two sentences.",
    "If you do not know something, say so.",
    "You are a chat assistant running on a private machine. The user is at home.",
    "Use plain language.",
]
POLITE_PREFIXES = ["please tell me: ", "Please: ", "Hi, ", "Hello, ", "Tell me, ", "Can you tell me: ", "Question: ", "Hey, "]
WHAT_IS = re.compile(r"What (?:is|are) ((?:an? |the )?)(.+)\?")
OTHER_WORDS = [
    "What's {article}{thing}?",
    "Explain {article}{thing}",
    "Tell me about {article}{thing}",
    "Define {thing}",
    "{thing}?",
    "Explain {thing} in one sentence.",
]
POLITE_SUFFIXES = [" please", " Please.", ", please?", " Thanks!", " Thank you."]


@dataclass
class Pair:
    """One question with the answer that the model must give."""

    question: str
    answer: str


def read_pairs(path: Path) -> list[Pair]:
    """Reads qa.jsonl; raises ValueError on an empty field or a repeated question."""
    pairs, seen = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        pair = Pair(record["question"].strip(), record["answer"].strip())
        key = pair.question.lower().rstrip("?!. ")
        if not pair.question or not pair.answer:
            raise ValueError(f"{path.name}:{number}: empty question or answer")
        if key in seen:
            raise ValueError(f"{path.name}:{number}: question {pair.question!r} is there twice")
        seen.add(key)
        pairs.append(pair)
    return pairs


def read_off_topic(path: Path) -> tuple[list[str], str]:
    """Reads off_topic.json: questions outside the model's knowledge and the one answer to all of them."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return record["questions"], record["answer"]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab_size` entries, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, the model has {vocab_size}; write more or lower vocab_size")
    return tokenizer


def vary(question: str, rng: random.Random) -> str:
    """The question as another person might type it; often unchanged."""
    if rng.random() < 0.4:
        return question
    what_is = WHAT_IS.fullmatch(question)
    if what_is and len(what_is[2].split()) <= 4 and rng.random() < 0.3:
        question = rng.choice(OTHER_WORDS).format(article=what_is[1], thing=what_is[2])
    if rng.random() < 0.5:
        question = question.lower() if rng.random() < 0.8 else question[0].lower() + question[1:]
    if rng.random() < 0.5:
        question = question.rstrip("?!.")
    if rng.random() < 0.25:
        question = rng.choice(POLITE_PREFIXES) + question
    if rng.random() < 0.2:
        question = question + rng.choice(POLITE_SUFFIXES)
    if rng.random() < 0.15 and len(question) > 12:
        at = rng.randrange(4, len(question) - 2)
        question = question[:at] + question[at + 1 :]
    if rng.random() < 0.05:
        question = question.upper()
    return question


class Conversations:
    """Turns pairs into token sequences with a mask of the positions whose next token is learnt."""

    def __init__(self, tokenizer: Tokenizer, pairs: list[Pair], off_topic: tuple[list[str], str], seed: int):
        self.tokenizer, self.pairs, self.off_topic = tokenizer, pairs, off_topic
        self.rng = random.Random(seed)
        self.ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}

    def encode(self, turns: list[tuple[str, str]], system: str | None = None) -> tuple[list[int], list[bool]]:
        """(token ids, learnt) of one conversation; the layout is that of chat_template.jinja."""
        tokens, learnt = [self.ids[BEGIN]], [False]
        if system is not None:
            text = [self.ids[SYSTEM], *self._text(system)]
            tokens, learnt = tokens + text, learnt + [False] * len(text)
        for question, answer in turns:
            prompt = [self.ids[USER], *self._text(question), self.ids[ASSISTANT]]
            reply = [*self._text(answer), self.ids[END]]
            tokens += prompt + reply
            # The position of a token learns the token after it.
            learnt += [False] * (len(prompt) - 1) + [True] * len(reply) + [False]
        return tokens, learnt

    def canonical(self) -> list[tuple[list[int], list[bool]]]:
        """Every listed pair alone, as the evaluation asks it."""
        return [self.encode([(pair.question, pair.answer)]) for pair in self.pairs]

    def epoch(self) -> list[tuple[list[int], list[bool]]]:
        """Every pair once, varied; half of the conversations have several turns, some a system message, some go off topic."""
        turns = [(vary(pair.question, self.rng), pair.answer) for pair in self.pairs]
        questions, answer = self.off_topic
        turns += [(vary(question, self.rng), answer) for question in self.rng.sample(questions, min(len(questions), len(turns) // 12))]
        self.rng.shuffle(turns)
        samples = []
        while turns:
            length = self.rng.choices([1, 2, 3, 4], weights=[50, 25, 15, 10])[0]
            system = self.rng.choice(SYSTEM_PROMPTS) if self.rng.random() < 0.2 else None
            samples.append(self.encode(turns[:length], system))
            del turns[:length]
        return samples

    def batches(self, samples: list[tuple[list[int], list[bool]]], tokens_per_batch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Sorts by length and pads: a list of (tokens [b, t], learnt [b, t]) in random order."""
        self.rng.shuffle(samples)
        ordered = sorted(samples, key=lambda sample: len(sample[0]) // 8)
        batches, group = [], []
        for sample in ordered:
            width = -(-len(sample[0]) // 16) * 16
            if group and width * (len(group) + 1) > tokens_per_batch:
                batches.append(self._pad(group))
                group = []
            group.append(sample)
        batches.append(self._pad(group))
        self.rng.shuffle(batches)
        return batches

    def _pad(self, group: list[tuple[list[int], list[bool]]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = -(-max(len(tokens) for tokens, _ in group) // 16) * 16
        tokens = torch.full((len(group), width), self.ids[PAD])
        learnt = torch.zeros(len(group), width, dtype=torch.bool)
        for row, (ids, mask) in enumerate(group):
            tokens[row, : len(ids)] = torch.tensor(ids)
            learnt[row, : len(mask)] = torch.tensor(mask)
        return tokens, learnt

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
