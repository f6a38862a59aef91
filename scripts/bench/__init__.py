"""One optimizer step, here and in TRL's GRPOTrainer, side by side: `scripts/bench/run` does everything.

`compare` starts one process for each and lets them take turns; `grpo_worker` and `trl_worker` are those processes; `workload` is what
both train on, `arithmetic` what it needs at least, `measure` how time and memory are taken, `report` the tables.

`scripts/bench/rollout` compares the rollout engines: `rollout_compare`, `rollout_worker` and `rollout_report`.

`scripts/bench/scale` measures what the trainer itself costs with many ranks and prompts: `scale_compare` asks, `scale_worker` is the
process of one rank of many, `scale_rank` what such a rank does, `scale_simulation` what is not real about it, `scale_step` what it is
given, `scale_report` the tables.
"""
