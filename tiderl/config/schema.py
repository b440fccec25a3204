"""Every setting of a job, once: name, type, default, help string, and what values make sense.

A job's configuration is one frozen tree of dataclasses. It is filled from TOML files (left to right) and then from flags
(`load.py`); a field's docstring is its help text. `validate` checks what can be checked without touching the machine;
each complaint is a `ConfigError` that starts with the dotted path.

Units are in the names: `_s` seconds, `_tokens`, `_bytes`; `num_` counts, `max_` caps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tiderl.types import Role


@dataclass(frozen=True)
class RunConfig:
    name: str = ""
    """Name of the run; its folder is `folder/name`. Empty: the config file's name and the time of the start."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Seed of the task stream, of sampling and of everything else that is random."""
    resume: str = ""
    """Run folder (its newest checkpoint) or checkpoint folder to go on from. Empty: start anew."""
    console: Literal["auto", "line", "off"] = "auto"
    """Progress on rank 0: `auto` draws a bar on a terminal and prints lines elsewhere; `line` always prints lines."""
    prometheus_port: int = 0
    """Port on which rank 0's coordinator serves its metrics for Prometheus. 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address of that port. The metrics are served in the clear, and hold numbers only."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    """Hugging Face model folder: config.json, safetensors, tokenizer with a chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of weights and activations in engine and trainer (the optimizer keeps fp32 master weights)."""
    max_context_tokens: int = 8192
    """Longest context of a trajectory. A trajectory that reaches it ends there with the reward it has."""


@dataclass(frozen=True)
class RolesConfig:
    num_actors: int = 1
    """Ranks 0 .. num_actors-1 train; the others are the pool."""
    num_ref: int = 0
    """Ranks of the pool that hold the reference model from the start; the rest of the pool generates. 0: the reference shares the
    actors' ranks (colocated). Must be 0 where there is no KL penalty, and so no reference."""

    def first_role(self, rank: int) -> Role:
        """What a rank begins as: actors come first, then Ref ranks, then rollout."""
        if rank < self.num_actors:
            return Role.ACTOR
        return Role.REF if rank < self.num_actors + self.num_ref else Role.ROLLOUT


@dataclass(frozen=True)
class EnvConfig:
    name: str = "babyai"
    """Environment that the servers must offer."""
    urls: tuple[str, ...] = ()
    """Base URLs of the environment servers, such as http://10.0.0.5:8300."""
    token_file: str = ""
    """File that holds the servers' bearer token (0600). Empty: the variable TIDERL_ENV_TOKEN, or no token."""
    split: str = "train"
    """Split that training tasks are drawn from."""
    num_tasks: int = 0
    """Training tasks are drawn from seeds 0 .. num_tasks-1 of the split. 0: as many as the server says it has."""


@dataclass(frozen=True)
class AgentConfig:
    max_turns: int = 20
    """Turns after which an episode is cut."""
    max_new_tokens: int = 512
    """Longest generation of one turn."""
    temperature: float = 1.0
    """Sampling temperature of training rollouts (> 0)."""
    system_prompt: bool = True
    """Put the environment's instruction in front as a system message."""


@dataclass(frozen=True)
class RolloutConfig:
    scheduler: Literal["ctb", "fixed"] = "ctb"
    """`ctb`: tasks are admitted, paused and resumed by the KV cache that they use. `fixed`: always `max_tasks_per_rank` tasks at
    once, and no thought of the cache, as inference engines do it (to compare with)."""
    max_tasks_per_rank: int = 256
    """Most tasks at once on one rollout rank, whatever the KV cache would hold."""
    footprint: Literal["growth", "paper"] = "growth"
    """What a task is taken to need: what it is expected to become, a group's shared prompt counted once (`growth`), or its present
    length (`paper`: always probes)."""
    growth_safety: float = 1.0
    """`growth` keeps so many standard deviations of the expected use free, beside the use itself."""
    length_quantile: float = 0.75
    """Quantile of the lengths seen of a task's type that a task is taken to have before its group is measured."""
    kv_reserve: float = 0.05
    """Share of a rank's KV cache that is left to the growth of running turns."""
    resume_margin: float = 0.05
    """After a pause a rank takes nothing before its use has fallen below this share under its budget (against flapping)."""
    diversity_penalty: float = 1.0
    """A group waits as if it came this many groups later for every task of its type on the rank."""
    spare_trajectories: int = 0
    """Trajectories of a training group beyond `train.group_size`: the first ones to finish are taken, the others dropped. Shortens
    the tail, and favours short trajectories."""
    task_timeout_s: float = 600.0
    """A task that takes longer, pauses not counted, fails as `timeout`."""
    max_attempts: int = 3
    """How often a task is tried before it is left out of its group."""
    max_failures_in_a_row: int = 100
    """So many failed tasks without one that succeeds end the job: something is wrong with all of them."""


@dataclass(frozen=True)
class EngineConfig:
    kind: Literal["vllm", "emulated"] = "vllm"
    """Generation engine. `emulated`: takes the time that the profiles in [emulate] say, and computes nothing."""
    kv_cache_tokens: int = 0
    """Size of the KV cache in tokens. 0: what the engine finds (on a GPU, by `gpu_memory_share`)."""
    block_size: int = 32
    """Tokens of a KV cache block (a multiple of 32 on a CPU)."""
    max_running: int = 256
    """Most sequences in one engine step."""
    max_batched_tokens: int = 8192
    """Most tokens in one engine step."""
    gpu_memory_share: float = 0.85
    """Share of a GPU's memory that the engine may use for weights and KV cache."""
    compile: bool = False
    """Let the engine compile and capture graphs. Off: eager (starts in seconds)."""


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    """Optimizer updates to make, counted from the start of the run (a resumed run goes on to the same number)."""
    groups_per_step: int = 16
    """Groups that one update consumes (B_ideal)."""
    group_size: int = 8
    """Trajectories per group (G)."""


@dataclass(frozen=True)
class TrainerConfig:
    kind: Literal["fsdp", "emulated"] = "fsdp"
    """Training backend. `emulated`: as `engine.kind`; the two go together."""
    max_micro_batch_tokens: int = 16384
    """Most tokens in one micro-batch of one actor; the longest trajectory must fit."""
    checkpoint_head: bool = True
    """Recompute the output head and log-probs in the backward pass (logits dominate memory at real vocabularies)."""
    checkpoint_layers: bool = False
    """Recompute every transformer layer in the backward pass."""
    window_tokens: int = 0
    """Most tokens of micro-batches whose forward is done and whose loss waits for the reference's log-probs (decoupled). 0: two
    micro-batches of `max_micro_batch_tokens`."""
    swap: Literal["offload", "resident", "auto"] = "auto"
    """Where an actor's reference is between two uses: in host memory (`offload`) or on the device (`resident`). `auto`: on the
    device where it fits beside the actor's own state and one micro-batch."""


@dataclass(frozen=True)
class LossConfig:
    clip_low: float = 0.2
    """Probability ratios are clipped from below at 1 - clip_low."""
    clip_high: float = 0.2
    """Probability ratios are clipped from above at 1 + clip_high."""
    kl_weight: float = 0.0
    """Weight of the KL penalty to the reference model. 0: no reference is loaded or computed."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token estimator of the KL divergence (Schulman, 2020)."""
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """Denominator of the ratio: the engine's log-probs, or the trainer's own before the update (use with `tis_cap`)."""
    tis_cap: float = 0.0
    """Truncated importance sampling between trainer and engine log-probs: weights are capped here. 0: off."""
    normalize_advantage_by_std: bool = True
    """Divide by the group's standard deviation (GRPO) or only subtract the mean (Dr. GRPO)."""


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this global norm. 0: off."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    min_lr_ratio: float = 0.1
    """Cosine decays to this share of the peak."""


@dataclass(frozen=True)
class ScheduleConfig:
    mode: Literal["tide", "stream", "async"] = "tide"
    """How training steps are fed. `tide`: groups are trained on as they become ready, reference and actor as `pipelining` says. To
    compare with: `stream` (as they become ready, reference and actor in turn for every micro-batch), `async` (when the whole batch
    is ready)."""
    pipelining: Literal["auto", "colocated", "decoupled"] = "auto"
    """Where mode `tide` computes the reference: on the actors' ranks, for all ready micro-batches at once (`colocated`); on ranks
    of its own while the actors' forwards run (`decoupled`, needs `roles.num_ref`); where it is predicted to be faster, step by step
    (`auto`)."""
    cost_model: Literal["pipeline", "paper"] = "pipeline"
    """What predicts a step's time: a replay of its timeline (`pipeline`), or the paper's Appendix A (`paper`)."""
    max_staleness: int = 1
    """A trajectory is trained on at most this many weight versions after the one it started with."""
    on_late: Literal["wait", "drop"] = "wait"
    """When a group would become too stale: `wait` for it before the next step opens, or `drop` it (counted as stale)."""


@dataclass(frozen=True)
class EvalConfig:
    every: int = 10
    """Evaluate every this many steps, and at the start and the end. 0: never."""
    num_tasks: int = 200
    """Held-out tasks of an evaluation round."""
    split: str = "test"
    """Split that evaluation tasks are drawn from."""
    temperature: float = 0.0
    """Sampling temperature of evaluation. 0: greedy."""
    max_wait_s: float = 600.0
    """How long the next weight sync waits for an evaluation; then it is marked incomplete."""


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 20
    """Save every this many steps, and at the end. 0: only at the end and on SIGTERM."""
    keep: int = 2
    """Newest checkpoints to keep."""
    export_hf: bool = True
    """Write the final model as a Hugging Face folder too."""


@dataclass(frozen=True)
class EmulateConfig:
    hardware: str = "configs/profiles/h100_sxm.toml"
    """Profile of the GPU that every rank is taken to have."""
    model: str = "configs/profiles/qwen2.5_7b.toml"
    """Profile of the model that is taken to be trained."""
    time_scale: float = 1.0
    """Emulated seconds that pass in a real one. The job's clock counts emulated seconds, and so do the scheduler's bounds
    (`start_s`, `sync_s`, `step_s`, `eval.max_wait_s`, `rollout.task_timeout_s`). The environment server must have the same."""


@dataclass(frozen=True)
class TimeoutsConfig:
    start_s: float = 600.0
    """From the start of a rank until it has joined (model loaded, engine built)."""
    heartbeat_s: float = 2.0
    """Interval of heartbeats."""
    lost_s: float = 60.0
    """A rank that sends no heartbeat for this long is lost."""
    collective_s: float = 300.0
    """Any torch.distributed operation."""
    sync_s: float = 120.0
    """A whole weight sync, from the handshake to the last acknowledgement."""
    step_s: float = 3600.0
    """A whole training step on the actors."""
    env_request_s: float = 60.0
    """One request to an environment server."""
    env_start_s: float = 30.0
    """How long the job waits at its start for the environment servers to answer."""
    shutdown_s: float = 12.0
    """From the request to stop until the state must be saved, and from there until all ranks must have left. Keep twice this
    below torchrun's own patience of 30 s."""


@dataclass(frozen=True)
class WireConfig:
    max_message_bytes: int = 256 * 1024 * 1024
    """Larger messages are refused."""
    bind_host: str = "0.0.0.0"
    """Address on which the coordinator listens (with CURVE keys of the job; nothing is served in the clear)."""
    sync_bucket_bytes: int = 64 * 1024 * 1024
    """Size of one broadcast of a weight sync."""
    canary_tolerance: float = 0.0
    """Largest difference of the canary's log-probs between trainer and engine after a sync. 0: 1e-4 in float32, 0.3 in bfloat16."""


@dataclass(frozen=True)
class Config:
    """The whole job."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    roles: RolesConfig = field(default_factory=RolesConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    emulate: EmulateConfig = field(default_factory=EmulateConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    wire: WireConfig = field(default_factory=WireConfig)
