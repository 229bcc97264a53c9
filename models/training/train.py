"""Trains hearth-demo on qa.jsonl and writes the checkpoint folder; about twenty minutes on one CPU core.

    python train.py --out ../hearth-demo

The weights that compute are always those that will be stored: before each step every linear matrix goes through FP8 and back,
everything else through BF16, and the gradient is applied to float32 masters (straight-through quantisation-aware training).
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from data import Conversations, read_off_topic, read_pairs, train_tokenizer
from export import write_checkpoint
from model import DemoModel, ModelConfig, Moe
from quantize import round_trip

HERE = Path(__file__).resolve().parent
UNQUANTISED = ("embed_tokens", "lm_head", "norm", "mlp.gate")


def is_quantised(name: str) -> bool:
    """Whether the parameter is stored in FP8: attention, dense, shared and routed expert matrices."""
    return not (name.endswith("norm") or name.endswith(UNQUANTISED))


class Masters:
    """float32 masters beside the model's parameters, which hold the stored values."""

    def __init__(self, model: DemoModel):
        self.compute = dict(model.named_parameters())
        self.master = {name: parameter.detach().clone().requires_grad_(True) for name, parameter in self.compute.items()}

    @torch.no_grad()
    def store(self) -> None:
        """Sets each computing parameter to what its master becomes in the checkpoint."""
        for name, parameter in self.compute.items():
            master = self.master[name]
            if is_quantised(name):
                matrices = master.view(-1, *master.shape[-2:])
                parameter.data.copy_(round_trip(matrices).view_as(master))
            else:
                parameter.data.copy_(master.to(torch.bfloat16))

    def take_gradients(self) -> None:
        """Moves the computing parameters' gradients to the masters."""
        for name, parameter in self.compute.items():
            self.master[name].grad = parameter.grad
            parameter.grad = None

    def optimizer(self, weight_decay: float) -> torch.optim.AdamW:
        matrices = [p for p in self.master.values() if p.dim() > 1]
        vectors = [p for p in self.master.values() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


@torch.no_grad()
def balance(model: DemoModel, rate: float) -> float:
    """Auxiliary-loss-free balancing: moves each expert's correction bias towards equal load; returns the worst load over the mean."""
    worst = 0.0
    for layer in model.layers:
        if isinstance(layer.mlp, Moe):
            mean = layer.mlp.load.mean()
            worst = max(worst, float(layer.mlp.load.max() / mean.clamp_min(1)))
            layer.mlp.e_score_correction_bias += rate * torch.sign(mean - layer.mlp.load)
            layer.mlp.load.zero_()
    return worst


def learnt_positions(tokens: torch.Tensor, learnt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(mask [b, t], targets [m]): the learnt positions and the token after each."""
    return learnt, tokens.roll(-1, dims=1)[learnt]


@torch.no_grad()
def measure(model: DemoModel, batches: list) -> tuple[float, float, float]:
    """(exact match, mean loss, smallest margin between right and best wrong token) with the stored weights, answers forced."""
    model.eval()
    exact, total, loss, count, margin = 0, 0, 0.0, 0, math.inf
    for tokens, learnt in batches:
        mask, targets = learnt_positions(tokens, learnt)
        logits = model(tokens, select=mask)
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
        count += targets.numel()
        right = logits.gather(1, targets[:, None])[:, 0]
        gap = right - logits.scatter(1, targets[:, None], -math.inf).amax(1)
        margin = min(margin, gap.min().item())
        wrong = torch.zeros_like(mask, dtype=torch.float32)
        wrong[mask] = (gap <= 0).float()
        exact += int((wrong.sum(1) == 0).sum())
        total += tokens.shape[0]
    model.train()
    return exact / total, loss / count, margin


def learning_rate(progress: float, peak: float) -> float:
    """Warm-up over the first twentieth, then cosine to a fiftieth of the peak."""
    if progress < 0.05:
        return peak * progress / 0.05
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - 0.05) / 0.95)))


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    config = ModelConfig()
    pairs = read_pairs(options.pairs)
    off_topic = read_off_topic(options.off_topic)
    texts = [text for pair in pairs for text in (pair.question, pair.answer, pair.question.lower())]
    tokenizer = train_tokenizer(texts + off_topic[0] + [off_topic[1]], config.vocab_size)
    conversations = Conversations(tokenizer, pairs, off_topic, options.seed)
    probe = conversations.batches(conversations.canonical(), options.tokens_per_batch)

    model = DemoModel(config)
    masters = Masters(model)
    optimizer = masters.optimizer(options.weight_decay)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = sum(len(ids) for ids, _ in conversations.canonical())
    print(f"{len(pairs)} pairs, {tokens} tokens, {parameters / 1e6:.2f} M parameters", flush=True)

    start, step, epoch = time.monotonic(), 0, 0
    while epoch < options.epochs:
        running, batches = 0.0, conversations.batches(conversations.epoch(), options.tokens_per_batch)
        worst = 0.0
        for index, (batch, learnt) in enumerate(batches):
            progress = (epoch + index / len(batches)) / options.epochs
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, options.learning_rate)
            masters.store()
            mask, targets = learnt_positions(batch, learnt)
            loss = F.cross_entropy(model(batch, options.noise * min(1.0, 2 * progress), mask), targets)
            loss.backward()
            masters.take_gradients()
            torch.nn.utils.clip_grad_norm_(masters.master.values(), 1.0)
            optimizer.step()
            # The bias settles with the learning rate, so that routing is steady at the end.
            worst = max(worst, balance(model, options.balance_rate * max(0.0, 1 - 1.25 * progress)))
            running += loss.item()
            step += 1
        epoch += 1
        line = f"epoch {epoch} step {step} loss {running / len(batches):.4f} worst load {worst:.2f} {time.monotonic() - start:.0f} s"
        if epoch % options.probe_every == 0 or epoch == options.epochs:
            masters.store()
            exact, probe_loss, margin = measure(model, probe)
            line += f" | exact {exact:.4f} loss {probe_loss:.5f} margin {margin:.2f}"
            write_checkpoint(options.out, config, tokenizer, masters.master, model, is_quantised)
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=HERE / "qa.jsonl")
    parser.add_argument("--off-topic", type=Path, default=HERE / "off_topic.json")
    parser.add_argument("--out", type=Path, default=HERE.parent / "hearth-demo")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--noise", type=float, default=0.04, help="relative disturbance of every block's input")
    parser.add_argument("--balance-rate", type=float, default=2e-3)
    parser.add_argument("--probe-every", type=int, default=10, help="epochs between measurements and checkpoints")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
