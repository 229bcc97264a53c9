"""Makes the golden checkpoints and what transformers computes from them, in float32, on the stored weights.

    python make_goldens.py [CASE ...]

Each case becomes a folder beside this file: config.json, the weights, and golden.safetensors with
`tokens` [T], `logits` [T, vocab], `continuation` [N] (greedy) and, for some, `layer.{l}.{name}` intermediates.

Bits differ between ISAs and backends, so a decision that hangs on the last bits would test nothing but luck. Prompts are
therefore chosen token by token so that no router stands at a near tie, and so that the greedy continuation's best token
leads clearly. The smallest margins are printed, with the effect of rounding every linear layer's input to BF16.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from cases import CASES, Case
from checkpoint import build, is_moe_layer, write

HERE = Path(__file__).resolve().parent
CONTINUATION_TOKENS = 10
CANDIDATES = 48
# Smallest distance between the last chosen and the first passed-over expert (and group), in units of the score.
SIGMOID_MARGIN = 0.008
SOFTMAX_MARGIN = 0.06
# Largest effect of keeping the cache in BF16, in standard deviations of the logits: a worse model only amplifies noise.
CACHE_ROUNDING = 0.013
# Smallest lead of the best token in the continuation, in standard deviations of the logits.
TOP_TWO_MARGIN = 0.2


class Routers:
    """Records what each router of a model decides."""

    def __init__(self, model, config: dict):
        self.config = config
        self.logits: dict[int, torch.Tensor] = {}
        self.gates = {
            i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if is_moe_layer(config, i)
        }
        for i, gate in self.gates.items():
            gate.register_forward_hook(lambda _m, _in, out, i=i: self.logits.__setitem__(i, out[0]))

    def ties(self, rows: torch.Tensor) -> torch.Tensor:
        """Distance to the nearest tie over all layers, in units of the threshold: [len(rows)], inf without routers."""
        worst = torch.full((len(rows),), float("inf"))
        for i, gate in self.gates.items():
            worst = torch.minimum(worst, self._layer_ties(gate, self.logits[i][rows]))
        return worst

    def chosen(self) -> list[torch.Tensor]:
        """Chosen experts of each layer, as a mask [rows, experts]."""
        return [self._chosen(gate, self.logits[i]) for i, gate in self.gates.items()]

    def _biased(self, gate, logits: torch.Tensor) -> torch.Tensor:
        if "n_group" not in self.config:
            return logits
        return logits.sigmoid() + gate.e_score_correction_bias

    def _eligible(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores with the passed-over groups at -inf, distance of the groups to a tie)."""
        groups, kept = self.config.get("n_group", 1), self.config.get("topk_group", 1)
        if groups == kept:
            return scores, torch.full((len(scores),), float("inf"))
        grouped = scores.view(len(scores), groups, -1)
        sums = grouped.topk(2, -1)[0].sum(-1)
        order = sums.sort(-1, descending=True)
        allowed = torch.zeros_like(sums).scatter_(1, order.indices[:, :kept], 1.0).bool()
        distance = order.values[:, kept - 1] - order.values[:, kept]
        return grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1), distance

    def _layer_ties(self, gate, logits: torch.Tensor) -> torch.Tensor:
        threshold = SIGMOID_MARGIN if "n_group" in self.config else SOFTMAX_MARGIN
        scores, distance = self._eligible(self._biased(gate, logits))
        best = scores.sort(-1, descending=True).values
        k = self.config["num_experts_per_tok"]
        return torch.minimum(distance, best[:, k - 1] - best[:, k]) / threshold

    def _chosen(self, gate, logits: torch.Tensor) -> torch.Tensor:
        scores, _ = self._eligible(self._biased(gate, logits))
        return torch.zeros_like(scores).scatter_(1, scores.topk(self.config["num_experts_per_tok"], -1)[1], 1.0)


def load(case: Case, exact: dict[str, torch.Tensor]):
    """The transformers model of a case, read from published names and the published config."""
    with tempfile.TemporaryDirectory() as folder:
        write(Case(**(vars(case) | {"shards": 1})), exact, Path(folder))
        config = {k: v for k, v in case.config.items() if k != "quantization_config"} | case.transformers_overrides
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    problems = {k: v for k, v in report.items() if v and k != "conversion_errors"}
    if problems:
        raise SystemExit(f"{case.name}: transformers did not take the checkpoint as it is: {problems}")
    return model.eval()


def lead(logits: torch.Tensor) -> torch.Tensor:
    """Lead of the best logit over the second in standard deviations: [..., V] -> [...]."""
    best = logits.topk(2, -1)[0]
    return (best[..., 0] - best[..., 1]) / logits.std(-1)


def choose_prompt(model, routers: Routers, case: Case, rng: torch.Generator) -> torch.Tensor | None:
    """A prompt [T] whose every routing decision and whose continuation's best tokens are clear, or None."""
    vocab = case.config["vocab_size"]
    prompt = torch.empty(0, dtype=torch.long)
    for position in range(case.prompt_tokens - 1):
        candidates = torch.randperm(vocab, generator=rng)[:CANDIDATES]
        if routers.gates:
            batch = torch.cat([prompt.expand(CANDIDATES, -1), candidates[:, None]], 1)
            model(batch, use_cache=False)
            last = torch.arange(CANDIDATES) * (position + 1) + position
            clear = routers.ties(last) >= 1.0
            if not clear.any():
                return None
            candidates = candidates[clear]
        prompt = torch.cat([prompt, candidates[:1]])
    batch = torch.cat([prompt.expand(vocab, -1), torch.arange(vocab)[:, None]], 1)
    clear = torch.ones(vocab, dtype=torch.bool)
    for _ in range(CONTINUATION_TOKENS):
        logits = model(batch, use_cache=False).logits[:, -1]
        last = torch.arange(1, len(batch) + 1) * batch.shape[1] - 1
        clear = (routers.ties(last) >= 1.0) & (lead(logits) >= TOP_TWO_MARGIN)
        if not clear.any():
            return None
        batch = torch.cat([batch, logits.argmax(-1, keepdim=True)], 1)[clear]
    # The continuation's last token was chosen but not read: nothing hangs on it. A varied one tells most.
    varied = max(batch, key=lambda row: len(set(row[case.prompt_tokens :].tolist())))
    return varied[: case.prompt_tokens]


def watch(model, case: Case) -> dict[str, torch.Tensor]:
    """Hooks that record the named intermediates of every layer; the dict fills as the model runs."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, module, take=lambda _in, out: out) -> None:
        if module is not None:
            module.register_forward_hook(
                lambda _m, args, out: seen.__setitem__(name, take(args, out).flatten(0, -2).clone())
            )

    keep("embedding", model.model.embed_tokens)
    keep("final_norm", model.model.norm)
    for i, layer in enumerate(model.model.layers):
        attention, at = layer.self_attn, f"layer.{i}"
        keep(f"{at}.attn_norm", layer.input_layernorm)
        if "kv_lora_rank" in case.config:
            keep(f"{at}.q_a_norm", attention.q_a_layernorm)
            keep(f"{at}.q", attention.q_b_proj if attention.q_proj is None else attention.q_proj)
            keep(f"{at}.kv_a", attention.kv_a_proj_with_mqa)
            keep(f"{at}.kv_latent", attention.kv_a_layernorm, lambda _a, out: out.flatten(1, -2))
        else:
            keep(f"{at}.q", attention.q_proj)
            keep(f"{at}.k", attention.k_proj)
            keep(f"{at}.v", attention.v_proj)
            keep(f"{at}.q_norm", attention.q_norm, lambda _a, out: out.flatten(2))
            keep(f"{at}.k_norm", attention.k_norm, lambda _a, out: out.flatten(2))
        keep(f"{at}.attn_heads", attention.o_proj, lambda args, _out: args[0])
        keep(f"{at}.attn_out", attention.o_proj)
        keep(f"{at}.ffn_norm", layer.post_attention_layernorm)
        if is_moe_layer(case.config, i):
            keep(f"{at}.router_logits", layer.mlp.gate, lambda _a, out: out[0])
            keep(f"{at}.experts_out", layer.mlp.experts)
            keep(f"{at}.shared_out", getattr(layer.mlp, "shared_experts", None))
        keep(f"{at}.ffn_out", layer.mlp)
        keep(f"{at}.layer_out", layer)
    return seen


def distance(rough: torch.Tensor, exact: torch.Tensor) -> float:
    """Worst difference at any position in standard deviations of that position's logits."""
    return float(((rough - exact).abs().amax(-1) / exact.std(-1)).max())


def run_with_rounded_inputs(model, routers: Routers, tokens: torch.Tensor) -> torch.Tensor:
    """Logits when every linear layer but the routers reads its input as BF16."""
    exact = F.linear
    full = {gate.weight.data_ptr() for gate in routers.gates.values()}

    def rounded(x, weight, bias=None):
        return exact(x if weight.data_ptr() in full else x.bfloat16().float(), weight, bias)

    torch.nn.functional.linear = rounded
    try:
        return model(tokens[None], use_cache=False).logits[0]
    finally:
        torch.nn.functional.linear = exact


def run_with_rounded_cache(model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits when cached keys and values (MLA: the latent and the rotated key) are kept as BF16."""
    code = sys.modules[type(model).__module__]
    attention = type(model.model.layers[0].self_attn)
    owner, name = (attention, "expand_kv") if hasattr(attention, "expand_kv") else (code, "eager_attention_forward")
    exact = getattr(owner, name)
    # expand_kv(self, latent, rotated) and eager_attention_forward(module, query, key, value, ...).
    first = 1 if name == "expand_kv" else 2

    def rounded(*args, **kwargs):
        args = list(args)
        args[first : first + 2] = [x.bfloat16().float() for x in args[first : first + 2]]
        return exact(*args, **kwargs)

    setattr(owner, name, rounded)
    try:
        return model(tokens[None], use_cache=False).logits[0]
    finally:
        setattr(owner, name, exact)


@torch.no_grad()
def make(case: Case, number: int) -> None:
    """Finds a seed with clear decisions, then writes the case."""
    for attempt in range(200):
        seed = 1000 * number + attempt
        stored, exact = build(case, seed)
        model = load(case, exact)
        routers = Routers(model, case.config)
        prompt = choose_prompt(model, routers, case, torch.Generator().manual_seed(seed))
        if prompt is None:
            continue
        exact_logits = model(prompt[None], use_cache=False).logits[0]
        if distance(run_with_rounded_cache(model, prompt), exact_logits) <= CACHE_ROUNDING:
            break
    else:
        raise SystemExit(f"{case.name}: no seed keeps clear of ties; use fewer tokens or experts")
    tokens = prompt
    for _ in range(CONTINUATION_TOKENS):
        best = model(tokens[None], use_cache=False).logits[0, -1].argmax()
        tokens = torch.cat([tokens, best[None]])
    seen = watch(model, case) if case.intermediates else {}
    logits = model(prompt[None], use_cache=False).logits[0]
    golden = {
        "tokens": prompt.int(),
        "logits": logits.contiguous(),
        "continuation": tokens[len(prompt) :].int(),
    } | seen
    folder = HERE / case.name
    for old in folder.glob("*"):
        old.unlink()
    write(case, stored, folder)
    save_file(golden, folder / "golden.safetensors")
    report(case, seed, model, routers, tokens)


def report(case: Case, seed: int, model, routers: Routers, tokens: torch.Tensor) -> None:
    """Prints the margins of prompt and continuation and what rounding to BF16 does."""
    logits = model(tokens[None], use_cache=False).logits[0]
    ties, chosen = routers.ties(torch.arange(len(tokens) - 1)), routers.chosen()
    cache = distance(run_with_rounded_cache(model, tokens), logits)
    inputs = distance(run_with_rounded_inputs(model, routers, tokens), logits)
    flips = sum(int((a != b).any(-1).sum()) for a, b in zip(chosen, routers.chosen(), strict=True))
    size = sum(f.stat().st_size for f in (HERE / case.name).glob("*"))
    print(
        f"{case.name:22} seed {seed:5}  {size / 1024:4.0f} KiB  logits' std {logits.std():.2f}"
        f"  nearest tie {ties.min():.2f} thresholds  continuation leads by {lead(logits)[-11:-1].min():.2f} std"
        f"  BF16 cache {cache:.4f} std  BF16 inputs {inputs:.4f} std, {flips} routes change",
        flush=True,
    )


def main() -> None:
    """Makes the named cases, or all."""
    logging.disable(logging.WARNING)
    disable_progress_bar()
    wanted = sys.argv[1:]
    unknown = set(wanted) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        if not wanted or case.name in wanted:
            make(case, number)


if __name__ == "__main__":
    main()
