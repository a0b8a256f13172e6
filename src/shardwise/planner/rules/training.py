"""Batches over time: lengths, schedules, packing (B4 to B10)."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.planner.rules.alternatives import listed, multiples
from shardwise.planner.rules.rule import BRIDGE, MEGATRONS, SHARDWISE, Case, Problem, rule


@rule("B4", "Megatron Bridge TrainingConfig.finalize", only=(BRIDGE, SHARDWISE))
def one_training_length(case: Case) -> Iterator[Problem]:
    names = ("train_iters", "train_samples", "num_epochs")
    set_ = [name for name in names if case.settings.get(name) is not None]
    if any(name in case.settings for name in names) and len(set_) != 1:
        yield Problem(f"{', '.join(set_) or 'none'} of {', '.join(names)}", "exactly one says how long to train", "train_iters=N alone")


@rule("B5", "Megatron Bridge ConfigContainer.validate", only=(*MEGATRONS, SHARDWISE))
def evaluation_batch_divides(case: Case) -> Iterator[Problem]:
    layout = case.layout
    gbs, mbs = case.count("eval_global_batch_size"), case.count("eval_micro_batch_size")
    if gbs is None and mbs is None:
        return
    gbs, mbs = gbs or layout.gbs, mbs or layout.mbs
    cp = case.count("eval_context_parallel_size") or layout.cp
    dp = max(1, layout.world // (layout.tp * layout.pp * cp))
    if gbs % (mbs * dp):
        given = f"eval_global_batch_size={gbs} eval_micro_batch_size={mbs}, DP {dp}"
        yield Problem(
            given, "the evaluation batch is no multiple of micro batch * DP", listed("eval_global_batch_size", multiples(mbs * dp, gbs))
        )


@rule("B6", "Megatron Core RampupBatchsizeNumMicroBatchesCalculator", only=(*MEGATRONS, SHARDWISE))
def rampup_steps_divide(case: Case) -> Iterator[Problem]:
    ramp, layout = case.settings.get("rampup_batch_size"), case.layout
    if not isinstance(ramp, (list, tuple)) or len(ramp) != 3 or not all(isinstance(each, int) and each > 0 for each in ramp):
        return
    start, step, _ = ramp
    unit = layout.mbs * layout.dp
    given = f"rampup_batch_size={list(ramp)}, gbs={layout.gbs}, MBS*DP {unit}"
    if start > layout.gbs or (layout.gbs - start) % step:
        yield Problem(
            given, f"{layout.gbs} - {start} is no multiple of the increment {step}", f"an increment that divides {layout.gbs - start}"
        )
    elif start % unit or step % unit:
        yield Problem(given, "every batch size on the way must be a multiple of MBS*DP", f"start and increment in multiples of {unit}")


@rule("B7", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE,))
def packing_sets_the_micro_batch(case: Case) -> Iterator[Problem]:
    settings, mbs = case.settings, case.layout.mbs
    if case.count("packed_sequence_size") and mbs != 1:
        yield Problem(f"packed_sequence_size={settings['packed_sequence_size']} mbs={mbs}", "a packed sample is a micro batch", "mbs=1")
    if settings.get("pack_sequences_in_batch") and mbs == 1:
        yield Problem("pack_sequences_in_batch=true mbs=1", "packing joins the samples of a micro batch", "mbs=2 or more")


@rule("B8", "Megatron Bridge SchedulerConfig.finalize", only=(BRIDGE, SHARDWISE))
def schedule_is_said_once(case: Case) -> Iterator[Problem]:
    settings = case.settings
    pairs = (
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_warmup_iters", "lr_warmup_samples"),
        ("lr_warmup_fraction", "lr_warmup_iters"),
        ("lr_warmup_fraction", "lr_warmup_samples"),
    )
    for first, second in pairs:
        if settings.get(first) and settings.get(second):
            yield Problem(f"{first} and {second}", "they say the same thing", f"only {first}")
    steps, iters = case.count("max_steps"), case.count("train_iters")
    if steps and iters and steps < iters:
        yield Problem(f"max_steps={steps} train_iters={iters}", "the schedule ends before training does", f"max_steps={iters} or more")


@rule("B9", "Megatron Bridge _calculate_scheduler_steps", severity="warning", only=(BRIDGE, SHARDWISE))
def warmup_ends_before_the_decay(case: Case) -> Iterator[Problem]:
    warmup, decay = case.count("lr_warmup_iters"), case.count("lr_decay_iters") or case.count("train_iters")
    if warmup and decay and warmup >= decay:
        given = f"lr_warmup_iters={warmup}, decay over {decay}"
        yield Problem(given, f"warm-up is cut to {decay - 1} steps", f"lr_warmup_iters={max(0, decay - 1)} or less")


@rule("B10", "Megatron Bridge ConfigContainer.validate", only=(BRIDGE,))
def one_sequence_length(case: Case) -> Iterator[Problem]:
    data = case.count("dataset.seq_length")
    if data and case.seq_len and data != case.seq_len:
        yield Problem(
            f"dataset.seq_length={data}, model {case.seq_len}", "model and data have one sequence length", f"{case.seq_len} in both"
        )
