"""A run of `sst2.sh` once more by Opacus: the same encoder, rows, Poisson rate, clipping norm, noise, learning rates and Adam.

In a separate environment (torch, opacus, transformers, pyyaml); nothing of dpx is imported:
    python experiments/fine_tuning/opacus_reference.py <run folder of dpx> <checkpoint folder> <folder of SST-2> [seeds]

Prints accuracy on the official dev set for each seed, and dpx's own. Runs of `train=last_layer` and `train=all` can be repeated; where the
head alone is trained the encoder reads every text once.
"""

import argparse
import csv
import gzip
import json
import statistics
from pathlib import Path

import torch
import yaml
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoTokenizer

MICROBATCH = 256


class Encoder(nn.Module):
    """The mean of a text's last hidden states."""

    def __init__(self, checkpoint: Path):
        super().__init__()
        self.bert = AutoModel.from_pretrained(
            checkpoint, add_pooling_layer=False, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
        self.width = self.bert.config.hidden_size

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        is_token_BT = tokens_BT != 0
        hidden_BTH = self.bert(tokens_BT, attention_mask=is_token_BT.long()).last_hidden_state
        return (hidden_BTH * is_token_BT[..., None]).sum(1) / is_token_BT.sum(1, keepdim=True)


def rows(path: Path, tokenizer, length: int) -> TensorDataset:
    """Tokens [N,T], 0 for padding, and labels [N]; equal rows once, as dpx has them."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        table = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    once = list(dict.fromkeys((row["sentence"], int(row["label"])) for row in table))
    tokens = tokenizer([text for text, _ in once], truncation=True, max_length=length, padding="max_length", return_tensors="pt")[
        "input_ids"
    ]
    return TensorDataset(tokens, torch.tensor([label for _, label in once]))


@torch.no_grad()
def encoded(encoder: nn.Module, texts: TensorDataset) -> torch.Tensor:
    """The encoder's output [N,H], short texts first so that little is padded."""
    tokens = texts.tensors[0]
    lengths = (tokens != 0).sum(1)
    order, out = lengths.argsort(), torch.zeros(len(tokens), encoder.width)
    for some in order.split(MICROBATCH):
        out[some] = encoder(tokens[some, : int(lengths[some].max())])
    return out


def rate(schedule: dict, step: int, steps: int) -> float:
    """Linear warm-up, then linear decay to zero."""
    peak, warmup = schedule["learning_rate"], schedule["warmup_steps"]
    return peak * (step + 1) / warmup if step + 1 < warmup else peak * (steps - step - 1) / max(steps - warmup, 1)


def trained(model: nn.Module, data: TensorDataset, config: dict, noise_multiplier: float) -> nn.Module:
    """`model` after the run's steps; whatever asks for a gradient is trained."""
    adam, schedule, steps = config["optimizer"], config["lr_schedule"], config["steps"]
    leaves = [(name, leaf) for name, leaf in model.named_parameters() if leaf.requires_grad]
    groups = [
        {"params": [leaf for name, leaf in leaves if not is_exempt(name)], "weight_decay": adam["weight_decay"]},
        {"params": [leaf for name, leaf in leaves if is_exempt(name)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(adam["beta1"], adam["beta2"]), eps=adam["eps"])
    size = config["batch_schedule"]["size"]
    private, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model.train(),
        optimizer=optimizer,
        data_loader=DataLoader(data, batch_size=size),
        noise_multiplier=noise_multiplier,
        max_grad_norm=config["clip"]["clipping_norm"],
    )
    optimizer.expected_batch_size = size
    loader.batch_sampler.sample_rate, loader.batch_sampler.steps = size / len(data), steps
    taken = 0
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=MICROBATCH, optimizer=optimizer) as physical:
        for inputs, labels in physical:
            for group in optimizer.param_groups:
                group["lr"] = rate(schedule, taken, steps)
            optimizer.zero_grad()
            nn.functional.cross_entropy(private(inputs), labels).backward()
            taken += not optimizer._check_skip_next_step(pop_next=False)
            optimizer.step()
    assert taken == steps, f"{taken} steps were taken, not {steps}"
    return private.eval()


def is_exempt(name: str) -> bool:
    """Official BERT code decays no bias and no LayerNorm."""
    return name.endswith("bias") or "LayerNorm" in name


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    inputs, labels = data.tensors
    right = sum(int((model(some).argmax(-1) == answers).sum()) for some, answers in zip(inputs.split(256), labels.split(256), strict=True))
    return 100 * right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("seeds", type=int, nargs="?", default=3)
    given = parser.parse_args()
    config = yaml.safe_load((given.run / "release" / "config.yaml").read_text())
    claim = json.loads((given.run / "release" / "privacy.json").read_text())
    (entered,) = claim["ledger"]["segments"]
    tokenizer = AutoTokenizer.from_pretrained(given.checkpoint)
    train, dev = (rows(given.data / f"{name}.tsv.gz", tokenizer, config["data"]["sequence_length"]) for name in ("train", "dev"))
    assert len(train) == entered["size"], f"{len(train)} rows here, {entered['size']} in the run"
    found = []
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        encoder = Encoder(given.checkpoint)
        head = nn.Linear(encoder.width, 2)
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        if config["train"]["_target_"].endswith("LastLayer"):
            if not found:
                train, dev = (TensorDataset(encoded(encoder.eval(), part), part.tensors[1]) for part in (train, dev))
            found.append(accuracy(trained(head, train, config, entered["noise_multiplier"]), dev))
        else:
            found.append(accuracy(trained(nn.Sequential(encoder, head), train, config, entered["noise_multiplier"]), dev))
        print(f"seed {seed}: {found[-1]:.2f} %", flush=True)
    ours = 100 * json.loads((given.run / "private" / "results.json").read_text())["heldout"]["accuracy"]
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    print(f"Opacus {statistics.mean(found):.2f}{spread} % over {len(found)} seeds; dpx, this run, {ours:.2f} %")


if __name__ == "__main__":
    main()
