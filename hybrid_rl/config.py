"""Every setting with its type, default and meaning. Hydra checks each YAML file and override against these classes.

This file documents all settings; `conf/` holds only choices that differ from it. It does not import torch: bad settings
must be reported before anything heavy loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Optional, cast

from omegaconf import OmegaConf


class ConfigError(ValueError):
    """A bad setting; the message is one line with the key, the problem and what to do."""


def bounded(default: Any, *, least: float | None = None, most: float | None = None, above: float | None = None) -> Any:
    """Return a field whose value must lie in [least, most], or be above `above`; preflight/values.py checks it."""
    return field(default=default, metadata={"least": least, "most": most, "above": above})


class EngineKind(Enum):
    """What samples completions."""

    auto = "auto"  # sglang if its package and a GPU are available, otherwise local
    sglang = "sglang"  # a separate process with a copy of the weights, one per rank
    local = "local"  # in this process, on the policy's own parameters


class Deterministic(Enum):
    """Whether the seed of a request alone decides its tokens."""

    auto = "auto"  # on for the CPU; off for a GPU, where it costs about a third of sglang's speed
    always = "always"
    never = "never"  # tokens may differ from run to run


class LayoutKind(Enum):
    """How samples lie in the rows of an update."""

    auto = "auto"  # trees on the CPU, packed on a GPU
    padded = "padded"
    packed = "packed"
    trees = "trees"  # the prompt of a group once, its completions as branches


class Precision(Enum):
    """The dtype of forward and backward."""

    auto = "auto"  # bfloat16 on a GPU, float32 on the CPU
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # with dynamic loss scaling


class Offload(Enum):
    """What is in host memory while the engine samples."""

    none = "none"
    optimizer = "optimizer"  # Adam's moments are in host memory while the engine samples
    all = "all"  # the shards of the parameters too


class Reference(Enum):
    """The model that the KL penalty refers to."""

    none = "none"
    frozen = "frozen"  # a copy of the policy at the beginning of RL
    base = "base"  # the policy without its LoRA adapters; needs no copy


class OldLogprobs(Enum):
    """The denominator of the ratio π/π_old."""

    behaviour = "behaviour"  # the engine's, as recorded at sampling
    # the trainer's, computed before the first update on a batch; corrections compare them with the engine's
    recomputed = "recomputed"


class KlEstimator(Enum):
    """Estimators of the KL divergence: see hybrid_rl/algo/kl.py."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlace(Enum):
    """What the KL penalty is added to."""

    loss = "loss"
    reward = "reward"


class Schedule(Enum):
    """The course of the learning rate after its warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class TinyConfig:
    """Shape of the embedded model, which is used if model.path is null."""

    layers: int = bounded(2, least=1)  # decoder layers
    hidden_size: int = bounded(128, least=1)  # width of the residual stream
    intermediate_size: int = bounded(384, least=1)  # width inside the MLP
    heads: int = bounded(4, least=1)  # of queries
    kv_heads: int = bounded(2, least=1)  # of keys and values; divides heads
    head_dim: int = bounded(32, least=2)  # width of a head; even
    rope_theta: float = bounded(100.0, above=0)  # base of the rotary embedding
    init_std: float = bounded(0.05, above=0)  # standard deviation of the random weights
    max_positions: int = 4096  # max_position_embeddings of its config.json
    words: list[str] = field(default_factory=list)  # texts that are one token each


@dataclass
class ModelConfig:
    """The policy at the beginning of the run."""

    path: Optional[str] = None  # a Hugging Face folder on this disk; null: the embedded tiny model
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class EngineConfig:
    """The engine that samples completions."""

    kind: EngineKind = EngineKind.auto
    slots: int = bounded(128, least=1)  # completions sampled at a time; the KV cache holds this many
    # sglang only, as all that follow: neighbouring ranks of a node that form one engine, each with a part of the weights
    tensor_parallel: int = bounded(1, least=1)
    # share of a GPU's free memory for weights and KV cache; 0: what the trainer leaves
    memory_fraction: float = bounded(0.0, least=0, most=0.95)
    deterministic: Deterministic = Deterministic.auto  # a request's seed alone decides its tokens
    # seconds without progress after which an engine counts as dead
    timeout: float = bounded(300.0, above=0)
    start_timeout: float = bounded(1800.0, above=0)  # seconds within which a new engine must be ready
    restarts: int = bounded(2, least=0)  # how often per run dead engines are started again
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of sglang.Engine, by its names


@dataclass
class OptimizerConfig:
    """AdamW, gradient clipping and the schedule of the learning rate."""

    lr: float = bounded(3e-6, above=0)  # learning rate after the warm-up
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of the two moments
    eps: float = bounded(1e-8, above=0)  # added to the root of the second moment
    weight_decay: float = bounded(0.0, least=0)  # applied to matrices, not to norms and biases
    warmup_steps: int = bounded(0, least=0)  # first steps, in which lr rises linearly
    schedule: Schedule = Schedule.constant
    final_lr: float = bounded(0.1, least=0, most=1)  # share of lr at the end of cosine and linear
    max_grad_norm: float = bounded(1.0, above=0)  # a larger gradient is scaled down to this norm


@dataclass
class LoraConfig:
    """Train low-rank adapters W + (alpha / rank) · B A and keep the model's own weights frozen.

    Experts stored as one fused parameter get no adapters.
    """

    rank: int = bounded(0, least=0)  # 0: train all weights
    alpha: int = bounded(32, least=1)  # the adapters count alpha / rank
    # names of modules; all-linear: every linear layer but the head
    targets: list[str] = field(default_factory=lambda: ["all-linear"])


@dataclass
class PolicyConfig:
    """How the policy is computed and sharded."""

    dtype: Precision = Precision.auto  # of forward and backward; parameters and moments are always float32
    # ranks that share one copy of the parameters; 0: all ranks of a node. With fewer, each group of ranks is a replica
    shard: int = bounded(0, least=0)
    offload: Offload = Offload.none  # what is moved to host memory while the engine samples
    activation_checkpointing: bool = False  # keep only each layer's input and recompute the rest in backward
    lora: LoraConfig = field(default_factory=LoraConfig)
    layout: LayoutKind = LayoutKind.auto
    # tokens of one row, the unit of forward and backward; 0: 2,048 on the CPU, up to 16,384 on a GPU as its memory allows
    # (hybrid_rl/policy/defaults.py), and the longest sample at least
    row_tokens: int = bounded(0, least=0)
    max_bad_steps: int = bounded(3, least=1)  # steps in a row with non-finite numbers before the run ends


@dataclass
class KlConfig:
    """Penalty on the KL divergence from algo.reference, estimated from sampled tokens: hybrid_rl/algo/kl.py."""

    coef: float = bounded(0.0, least=0)  # weight of the penalty; 0: the KL is only reported
    estimator: KlEstimator = KlEstimator.k3
    place: KlPlace = KlPlace.loss
    # in the loss: weight it by π/π_old, so that it stays unbiased as the policy changes; null: if a batch has several
    # updates
    unbiased: Optional[bool] = None
    target: float = bounded(0.0, least=0)  # nats a token that coef is adapted to reach; 0: coef is constant
    # coef changes by at most 20 % / horizon a step: 1.2-fold in 10 steps, 7-fold in 100
    horizon: int = bounded(10, least=1)


@dataclass
class CriticConfig:
    """A model that predicts each token's return, for advantages that need one (gae, vtrace)."""

    path: Optional[str] = None  # a Hugging Face folder to start from; null: that of the policy
    # change of a prediction beyond which its loss is clipped; 0: no clipping
    clip: float = bounded(0.2, least=0)
    warmup_steps: int = bounded(0, least=0)  # first RL steps in which only the critic is trained
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass
class AlgoConfig:
    """The algorithm. Parts are functions by `_target_`, their other keys are arguments: see conf/algo/<part>/."""

    # the credit of each rollout or token
    advantage: dict[str, Any] = field(default_factory=lambda: {"_target_": "hybrid_rl.algo.grpo.advantages"})
    # the loss of a token
    loss: dict[str, Any] = field(default_factory=lambda: {"_target_": "hybrid_rl.algo.ppo_clip.loss"})
    # how much each token counts
    aggregation: dict[str, Any] = field(default_factory=lambda: {"_target_": "hybrid_rl.algo.aggregation.token_mean"})
    # any number of functions by name, which correct the mismatch of trainer and engine
    correction: dict[str, Any] = field(default_factory=dict)
    # any number of functions by name, which select the tokens that an update trains on
    selection: dict[str, Any] = field(default_factory=dict)
    # optimizer steps per pass over the batch, each on its share of the groups
    minibatches: int = bounded(1, least=1)
    # passes over a batch; with one minibatch and one epoch, updates are exactly on-policy
    epochs: int = bounded(1, least=1)
    old_logprobs: OldLogprobs = OldLogprobs.behaviour  # the denominator of the ratio π/π_old
    # replace groups in which all rollouts have the same: outcome, reward (with penalties), parts (all of them), or the
    # part of this name; none: replace no group
    silent_by: str = "outcome"
    mask_truncated: bool = False  # leave rollouts that reached rollout.max_tokens out of the loss
    # share of rollout.max_tokens, at its end, in which tokens cost linearly increasing reward; 0: off
    overlong_share: float = bounded(0.0, least=0, most=1)
    overlong_penalty: float = bounded(1.0, least=0)  # the cost of reaching rollout.max_tokens
    entropy_coef: float = bounded(0.0, least=0)  # weight of the entropy bonus in the loss
    reference: Reference = Reference.none  # the model that the KL penalty refers to
    kl: KlConfig = field(default_factory=KlConfig)
    teacher: Optional[str] = None  # a Hugging Face folder with the same vocabulary, for advantage=opd
    critic: CriticConfig = field(default_factory=CriticConfig)


def unbiased_kl(algo: AlgoConfig) -> bool:
    """Return whether the KL in the loss is weighted by the ratio."""
    return algo.epochs * algo.minibatches > 1 if algo.kl.unbiased is None else algo.kl.unbiased


@dataclass
class HandoverConfig:
    """The handover of weights from policy to engine."""

    # size of the buckets in which weights are gathered for an engine with its own memory
    bucket_mib: int = bounded(512, least=1)
    verify: bool = False  # compare engine and policy after every handover; the first of RL is always compared


@dataclass
class RolloutConfig:
    """Sampling and rewards of an RL step."""

    batch_size: int = bounded(128, least=1)  # rollouts that a step trains on
    # newest RL steps whose rollouts and evaluations stay on disk, besides those of the first step; 0: all
    keep_steps: int = bounded(100, least=0)
    group_size: int = bounded(16, least=1)  # rollouts per task
    temperature: float = bounded(1.0, above=0)  # of sampling and of every log-probability
    top_k: int = bounded(0, least=0)  # 0: off
    top_p: float = bounded(1.0, least=1e-06, most=1.0)  # 1: off
    max_tokens: int = bounded(128, least=1)  # most sampled tokens of a completion
    # answers of the policy in a conversation with an environment; all its tokens together, replies included, are at most
    # max_tokens
    max_turns: int = bounded(8, least=1)
    max_prompt_tokens: int = bounded(512, least=1)  # a longer prompt ends the run before the model loads
    max_replacements: int = bounded(4, least=0)  # rounds of replacing groups without a signal by new ones
    # groups under way in a step, as a multiple of those that it trains on: sampling stops when enough have ended, and
    # the others go on in the next step under its weights, see docs/concepts.md; 1: a step ends all that it begins
    oversample: float = bounded(1.0, least=1)
    # versions that the oldest token of a group under way may be behind; beyond, the group is discarded and counted
    max_staleness: int = bounded(8, least=0)
    reward_workers: int = bounded(1, least=1)  # processes that compute rewards while the engine generates
    reward_timeout: float = bounded(10.0, above=0)  # seconds for one reward
    reward_start_timeout: float = bounded(60.0, above=0)  # seconds for a worker to load the reward function
    # completions that an async or batched reward gets at a time, at most; others get one
    reward_batch: int = bounded(16, least=1)
    # share of a step's rewards that may fail (raise, time out, …) without ending the run
    max_reward_failures: float = bounded(0.5, least=0, most=1)


@dataclass
class DataConfig:
    """The keys of `data` that are not arguments of its function: docs/data.md."""

    # variables of the model's chat template, like {enable_thinking: false}
    template_arguments: dict[str, Any] = field(default_factory=dict)
    # false, for base models: a prompt is the texts of its messages, a blank line between them, and no more
    chat_template: bool = True
    # a column (task.columns) with the list of tools that the chat template shows for the task
    tools: Optional[str] = None
    # leave out tasks whose prompt has more than rollout.max_prompt_tokens tokens, or that fill more than a row in SFT;
    # false: such a task is refused
    drop_long: bool = False
    # share of the RL draws by source, in any unit, like {maths: 3, code: 1}; {}: all tasks are one pool
    weights: dict[str, float] = field(default_factory=dict)
    # _target_: an order of RL's tasks, see hybrid_rl/data/curriculum.py; {}: each task once an epoch
    curriculum: dict[str, Any] = field(default_factory=dict)


def data_config(data: Mapping[Any, Any]) -> DataConfig:
    """Return the keys of `data` that are the run's own. Raises OmegaConfBaseException for a value of another type."""
    own = {key: data[key] for key in (f.name for f in fields(DataConfig)) if data.get(key) is not None}
    return cast(DataConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), own)))


def loader(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the other keys of `data`: the function that loads the tasks, and its arguments."""
    own = [f.name for f in fields(DataConfig)]
    return {key: value for key, value in data.items() if key not in own}


@dataclass
class RewardModelConfig:
    """A sequence classifier of one label whose score is added to the reward: docs/rewards.md."""

    path: Optional[str] = None  # a Hugging Face folder; null: no reward model
    weight: float = bounded(1.0, least=-1000000.0, most=1000000.0)  # of the score; 0: logged as a measure, not paid
    # tokens that a conversation may have for it, at most what the model takes; a longer one's reward fails
    max_tokens: int = bounded(4096, least=1)
    batch_tokens: int = bounded(16384, least=1)  # tokens that it reads at a time, padding included


@dataclass
class SftConfig:
    """The SFT stage."""

    steps: int = bounded(100, least=0)  # 0: no warm-up
    batch_size: int = bounded(32, least=1)  # demonstrations of a step
    # share of the steps during which the maximum length of examples grows from shortest to longest
    curriculum: float = bounded(0.0, least=0, most=1)
    # share of each target's probability that is spread over the vocabulary
    label_smoothing: float = bounded(0.0, least=0, most=0.9)
    checkpoint_every: int = bounded(0, least=0)  # steps; 0: only at the end of the stage
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5))


@dataclass
class RlConfig:
    """The RL stage."""

    steps: int = bounded(20, least=0)  # 0: no RL
    checkpoint_every: int = bounded(10, least=1)  # steps; the last step is saved in any case
    keep_checkpoints: int = bounded(2, least=1)  # number of newest checkpoints to keep
    # also keep the checkpoint with the best evaluation; every evaluated step is then saved
    keep_best: bool = False
    eval_every: int = bounded(0, least=0)  # steps; 0: only before and after the stage
    # steps in a row without an update (no signal, all masked) before the run ends with an error; 0: no limit
    max_empty_steps: int = bounded(10, least=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CheckpointConfig:
    """How checkpoints are written."""

    background: bool = True  # write a copy in host memory while the next step runs; false: wait for the disk
    timeout: float = bounded(900.0, above=0)  # seconds for writing one checkpoint


class ExportDtype(Enum):
    """The dtype of exported weights."""

    source = "source"  # that of each weight in the source model folder
    float32 = "float32"


@dataclass
class ExportConfig:
    """The exported model in final/."""

    dtype: ExportDtype = ExportDtype.source  # of the weights in final/; training uses float32


@dataclass
class EvalConfig:
    """Evaluations on held-out tasks."""

    temperature: float = bounded(1.0, least=0)  # 0: the most likely token
    samples: int = bounded(1, least=1)  # completions per task; their mean counts
    greedy: bool = False  # also decode each task greedily, once, and report that beside the samples
    max_tasks: int = bounded(0, least=0)  # 0: every held-out task
    # python -m hybrid_rl.evaluate: a second model's folder, evaluated on the same tasks with the same seeds, and compared
    against: Optional[str] = None
    # a sample with at least this reward is correct, as pass@k counts it
    pass_reward: float = bounded(1.0, least=-1000000.0, most=1000000.0)


class TrackerKind(Enum):
    """Where metrics go besides metrics.jsonl."""

    none = "none"
    tensorboard = "tensorboard"  # event files in the run's folder
    wandb = "wandb"
    mlflow = "mlflow"  # to MLFLOW_TRACKING_URI, else to <output_dir>/mlflow.db
    trackio = "trackio"


@dataclass
class TrackerConfig:
    """An experiment tracker beside metrics.jsonl: docs/runs.md."""

    kind: TrackerKind = TrackerKind.none
    project: str = "hybrid_rl"  # of W&B and trackio; the experiment of MLflow
    name: str = ""  # of the run; empty: <recipe>/<name of its folder>
    tags: list[str] = field(default_factory=list)  # W&B and MLflow
    # W&B: only files, for `wandb sync`; MLflow: <output_dir>/mlflow.db whatever the environment says
    offline: bool = False
    # further arguments, by their names: of wandb.init, trackio.init, TensorBoard's SummaryWriter, or Accelerate's
    # MLflowTracker
    arguments: dict[str, Any] = field(default_factory=dict)


class ConsoleKind(Enum):
    """What a run shows on standard output."""

    lines = "lines"
    # in a terminal, and with one rank, also a view of the current phase, the last step and the course of the reward
    live = "live"


@dataclass
class SweepConfig:
    """How the jobs of a sweep (-m) are ended early."""

    # end a job when its best evaluation between steps so far (rl.eval_every) is below the median of the other jobs' at
    # the same step; it is saved, and resume=<its folder> goes on with it
    prune: bool = False
    prune_after: int = bounded(4, least=1)  # other jobs that must have been evaluated at that step


@dataclass
class Config:
    """All settings of a run."""

    name: str = ""  # the recipe's name, set by the recipe
    seed: int = bounded(0, least=0, most=2**63 - 1)  # of weights, tasks and sampling
    # seed of the order of tasks and demonstrations; null: seed
    data_seed: Optional[int] = bounded(None, least=0, most=2**63 - 1)
    device: str = "auto"  # auto, cpu, cuda
    ranks: int = bounded(0, least=0)  # processes that train together; 0: one per visible GPU, one on the CPU
    # seconds without progress after which a rank counts as hanging, and the run ends
    rank_timeout: float = bounded(1800.0, above=0)
    # seconds after SIGTERM or Ctrl-C in which the running step may end and be saved; then the run is killed
    stop_timeout: float = bounded(600.0, above=0)
    # use only operations that give the same bits in every run; slower on a GPU, see docs/failures.md
    deterministic: bool = False
    threads: int = bounded(0, least=0)  # CPU threads of torch; 0: one for tiny models, all cores otherwise
    output_dir: str = "outputs"  # a run is written to <output_dir>/<name>/<time>
    # never: a new run; auto: the newest run of this recipe, if it is unfinished, else a new one; must: like auto, but
    # an error if there is none; or the folder of a run: its settings are used, and the command line only changes them
    resume: str = "never"
    console: ConsoleKind = ConsoleKind.lines
    dry_run: bool = False  # check everything, print the plan, and stop
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    handover: HandoverConfig = field(default_factory=HandoverConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    # _target_: a function that returns hybrid_rl.data.TaskSets; the other keys are its arguments, except those of
    # DataConfig
    data: dict[str, Any] = field(default_factory=lambda: asdict(DataConfig()))
    # _target_: a function (completion, task) → reward, or several by name with their weights: docs/rewards.md
    reward: dict[str, Any] = field(default_factory=dict)
    # _target_: a class whose objects answer the policy turn by turn: docs/environments.md; {}: single-turn tasks
    environment: dict[str, Any] = field(default_factory=dict)
    reward_model: RewardModelConfig = field(default_factory=RewardModelConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)


def only_evaluates(config: Config) -> bool:
    """Return whether a run has no training steps, so that there is nothing to save or export."""
    return not config.sft.steps and not config.rl.steps
