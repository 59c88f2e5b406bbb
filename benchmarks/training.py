"""Tokens a second and peak memory of the product's training beside transformers' Trainer and TRL's SFTTrainer.

All train the same weights in float32 on the same rows of worked arithmetic, in the same order, micro-batches and
padding, with AdamW of the same settings and clipping; that it is the same work is seen by the losses of its steps
(`loss_difference`, the largest between any two). Ours is the whole loop of the stage `train`, with its telemetry,
counting and checks. The peers have what is fastest on a processor: fused AdamW, no recomputation, no autocast, no
logging, no evaluation, no saving, rows tokenised and sorted beforehand, loaded in the same process, adapters by PEFT on
the same layers. TRL's loss never holds logits whole. One thread.

    {full,lora}_speed_vs_{trainer,trl}    tokens a CPU second, ours over theirs: median over rounds, which alternate; a
                                          process each, the time from the first step's end to that before the last
    {full,lora}_memory_vs_{trainer,trl}   peak bytes, ours over theirs: tensors that stand between steps, and the most
                                          that torch's allocator hands out beside them (its profiler's events)

Evaluation and the checkpoint, which the peers are spared, fall on the last step and are not measured.

    python -m benchmarks.training [--quick] [--techniques full lora] [--peers trainer trl] [--rounds N] [--data FOLDER]
"""

from __future__ import annotations

import gc
import gzip
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cells import real_model
from benchmarks.chain import report
from benchmarks.forked import in_own_process
from benchmarks.memory_cases import SIZES, llama
from benchmarks.options import Options
from benchmarks.segment import Rows, Silent, ingested, plan_of, selected, trained

if TYPE_CHECKING:
    from data_contracts.records import Plan

TECHNIQUES: dict[str, tuple[dict[str, Any], float]] = {
    "full": ({"method": "full"}, 1e-5),
    "lora": ({"method": "lora", "r": 16, "alpha": 32.0}, 1e-4),
}
PEERS = ("trainer", "trl")
MICRO, ACCUMULATION, LONGEST = 2, 2, 256
STEPS, MEMORY_STEPS = 5, 4
"""The profiler is on from the end of the first to the end of the third; ours evaluates and saves in the last."""


class Watch(Silent):
    """Notes the CPU seconds at which each step ended, or the memory of steps 2 and 3."""

    def __init__(self, memory: bool) -> None:
        self.ends: list[float] = []
        self.stand, self.handed_out, self._memory = 0, 0, memory
        self._profile: Any = None

    def progress(self, done: int, total: int) -> None:
        """Take note of the end of step `done`."""
        import torch

        self.ends.append(time.process_time())
        if self._memory and done == 1:
            self.stand = standing()
            activities = [torch.profiler.ProfilerActivity.CPU]
            self._profile = torch.profiler.profile(activities=activities, profile_memory=True)
            self._profile.__enter__()
        elif self._memory and done == MEMORY_STEPS - 1:
            self._profile.__exit__(None, None, None)
            self.handed_out = handed_out(self._profile)

    def figures(self) -> dict[str, Any]:
        """Return seconds of the steps 2 to the last but one, and bytes."""
        return {"cpu_seconds": self.ends[-2] - self.ends[0], "bytes": self.stand + self.handed_out}


def standing() -> int:
    """Return the bytes of every storage that a tensor refers to now."""
    import torch

    gc.collect()
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and item.device.type == "cpu"]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in found}.values())


def handed_out(profile: Any) -> int:
    """Return the most bytes that torch's allocator had handed out more than at the start."""
    import numpy as np

    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = np.array([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())], dtype=np.int64)
    return int(np.cumsum(sizes).max(initial=0))


def settings(rate: float) -> Any:
    """Return AdamW's settings, and one evaluation of few rows at the end."""
    from data_contracts.config import TrainConfig

    return TrainConfig(learning_rate=rate, warmup_steps=0, evaluations=1, validation_rows=4)


def ours(folder: Path, rows: Rows, name: str, steps: int, memory: bool) -> dict[str, Any]:
    """Train by the product's loop in this process."""
    from data_contracts.arrow import read_table

    technique, rate = TECHNIQUES[name]
    plan, watch = plan_of(technique, MICRO, ACCUMULATION, LONGEST), Watch(memory)
    result = trained(folder, rows, plan, settings(rate), seed=0, count=steps * MICRO * ACCUMULATION, channel=watch)
    chunks = [read_table(folder / "rows" / chunk) for chunk in result["chunks"] if chunk.startswith("curve-")]
    losses = [loss for chunk in chunks for loss in chunk.column("train_loss").to_pylist()]
    return watch.figures() | {"losses": losses}


def theirs(peer: str, folder: Path, rows: Rows, name: str, steps: int, memory: bool) -> dict[str, Any]:
    """Train by a peer in this process."""
    import numpy as np
    import torch
    from datasets import Dataset
    from peft import get_peft_model
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling, SFTTrainer

    from stages.model.load import load_model, load_tokenizer

    technique, rate = TECHNIQUES[name]
    watch = Watch(memory)

    class Noting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.progress(state.global_step, state.max_steps)

    examples, windows = laid_out(folder, rows, plan_of(technique, MICRO, ACCUMULATION, LONGEST), steps)
    found = [examples.row(int(index)) for index in windows]
    data = Dataset.from_list([
        {"input_ids": row.input_ids.tolist(), "labels": np.where(row.answer_mask, row.input_ids, -100).tolist()}
        for row in found
    ])  # fmt: skip
    shared: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATION,
        "num_train_epochs": 1, "learning_rate": rate, "lr_scheduler_type": "constant", "weight_decay": 0.0,
        "max_grad_norm": 1.0, "optim": "adamw_torch_fused", "adam_beta2": 0.999, "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "logging_strategy": "steps" if memory else "no", "logging_steps": 1, "train_sampling_strategy": "sequential",
        "dataloader_pin_memory": False, "remove_unused_columns": False,
    }  # fmt: skip
    set_seed(0)
    model: Any = load_model(rows.pin)
    more: dict[str, Any] = {"train_dataset": data, "data_collator": DataCollatorForLanguageModeling(pad_token_id=0),
                            "callbacks": [Noting()]}  # fmt: skip
    adapters = adapters_of(model, technique) if name == "lora" else None
    torch.manual_seed(0)
    if peer == "trl":
        tokenizer = load_tokenizer(rows.pin)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        config = SFTConfig(**shared, max_length=None, dataset_kwargs={"skip_prepare_dataset": True})
        trainer: Any = SFTTrainer(model, args=config, processing_class=tokenizer, peft_config=adapters, **more)
    else:
        model = get_peft_model(model, adapters) if adapters else model
        trainer = Trainer(model, args=TrainingArguments(**shared), **more)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return watch.figures() | {"losses": losses}


def adapters_of(model: Any, technique: dict[str, Any]) -> Any:
    """Return PEFT's settings of the same adapters as ours."""
    from peft import LoraConfig

    from data_contracts.method import resolve
    from stages.technique.base import Technique

    own: Any = resolve(Technique, technique, "technique")
    return LoraConfig(r=own.r, lora_alpha=own.alpha, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM",
                      target_modules=sorted({place for place, _ in own._targets(model)}))  # fmt: skip


def laid_out(folder: Path, rows: Rows, plan: Plan, steps: int) -> tuple[Any, list[int]]:
    """Return the examples and the rows in the order in which our windows' micro-batches hold them."""
    from stages.train.examples import Examples
    from stages.train.windows import Windows

    selection = selected(folder / "selection.arrow", rows, 0, steps * MICRO * ACCUMULATION)
    examples = Examples(selection, [rows.tokens["pool"]])
    windows, found = Windows(examples, examples.visits(plan, settings(1.0), 0), plan), []
    for step in range(steps):
        window, layout = windows.layout(step)
        found += [int(window[place]) for micro in layout for place in micro.places]
    return examples, found


def imported() -> None:
    """Load the libraries, so that processes that are forked afterwards need not."""
    import datasets
    import peft
    import torch
    import transformers
    import trl.trainer.sft_trainer

    torch.set_num_threads(1)
    assert all((datasets, peft, transformers.Trainer, trl.trainer.sft_trainer.SFTTrainer))


def arm(run: str, folder: Path, rows: Rows, name: str, steps: int, memory: bool) -> dict[str, Any]:
    """Run one arm in a process of its own, one thread."""

    def work() -> dict[str, Any]:
        folder.mkdir(parents=True, exist_ok=True)
        if run == "ours":
            return ours(folder / "ours", rows, name, steps, memory)
        return theirs(run, folder, rows, name, steps, memory)

    return in_own_process(work)


def compared(folder: Path, rows: Rows, name: str, peers: list[str], rounds: int, steps: int) -> dict[str, Any]:
    """Return the ratios of one technique."""
    runs = ["ours", *peers]
    held = {run: arm(run, folder, rows, name, MEMORY_STEPS, True) for run in runs}
    print(json.dumps({"technique": name} | {run: found["bytes"] for run, found in held.items()}), flush=True)
    seconds: dict[str, list[float]] = {run: [] for run in runs}
    for number in range(rounds):
        for run in runs[number % len(runs) :] + runs[: number % len(runs)]:
            seconds[run].append(arm(run, folder, rows, name, steps, False)["cpu_seconds"])
        print(
            json.dumps({"technique": name} | {run: round(found[-1], 2) for run, found in seconds.items()}), flush=True
        )
    _, windows = laid_out(folder, rows, plan_of(TECHNIQUES[name][0], MICRO, ACCUMULATION, LONGEST), steps)
    lengths = rows.table("pool").column("n_tokens").to_numpy()
    tokens = int(sum(lengths[index] for index in windows[MICRO * ACCUMULATION : -MICRO * ACCUMULATION]))
    differ = [
        abs(mine - other)
        for peer in peers
        for mine, other in zip(held["ours"]["losses"], held[peer]["losses"], strict=True)
    ]
    found: dict[str, Any] = {f"{name}_tokens_per_second": round(tokens / statistics.median(seconds["ours"]), 1)}
    found |= {
        f"{name}_peak_mib": round(held["ours"]["bytes"] / 2**20, 1),
        f"{name}_loss_difference": round(max(differ), 6),
    }
    for peer in peers:
        ratios = [other / mine for mine, other in zip(seconds["ours"], seconds[peer], strict=True)]
        found[f"{name}_speed_vs_{peer}"] = round(statistics.median(ratios), 3)
        found[f"{name}_memory_vs_{peer}"] = round(held["ours"]["bytes"] / held[peer]["bytes"], 3)
    return found


def pinned(quick: bool, data: Path, folder: Path) -> Path:
    """Return the folder of a model: SmolLM2-135M, or a random one of 20M parameters with a small real tokenizer."""
    if not quick:
        return real_model(folder)
    llama(folder, **SIZES["20M"])
    for path in (data / "stories260k").glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def rows_of(data: Path, folder: Path, model: Path) -> Rows:
    """Ingest worked arithmetic; the answer is most of a row."""
    with gzip.open(data / "gsm8k" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        every = [json.loads(line) for line, _ in zip(lines, range(400), strict=False)]
    made = [{"instruction": row["question"], "input": "", "output": row["answer"]} for row in every]
    splits = {"pool": made[:350], "validation": made[350:370], "holdout": made[370:390], "target": made[390:]}
    return ingested(folder, model, splits, LONGEST)


def main() -> None:
    """Run the arms and report the ratios."""
    parser = Options(
        __doc__, "a random model of 20M parameters, full beside Trainer and lora beside TRL; under 3 minutes"
    )
    parser.add_argument("--techniques", nargs="+", choices=sorted(TECHNIQUES), default=list(TECHNIQUES))
    parser.add_argument("--peers", nargs="+", choices=PEERS)
    parser.add_argument("--rounds", type=int)
    given = parser.read()
    rounds, named = given.rounds or (2 if given.quick else 3), {"full": ["trainer"], "lora": ["trl"]}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        imported()
        rows = rows_of(given.data, folder / "rows", pinned(given.quick, given.data, folder / "model"))
        figures: dict[str, Any] = {"model": "20M" if given.quick else "SmolLM2-135M"}
        for name in given.techniques:
            peers = given.peers or (named[name] if given.quick else list(PEERS))
            figures |= compared(folder / "arms", rows, name, peers, rounds, STEPS)
        report("training", figures)


if __name__ == "__main__":
    main()
