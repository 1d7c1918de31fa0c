"""Every setting with its type, default and meaning. Hydra checks each YAML file and override against these classes.

Learn the system's knobs by reading this file; `conf/` holds only choices that differ from it. No torch here: a bad
setting must be reported before anything heavy loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Optional


class ConfigError(ValueError):
    """A bad setting, in one line that a user can act on."""


def bounded(default: Any, *, least: float | None = None, most: float | None = None, above: float | None = None) -> Any:
    """Return a field whose value must lie in [least, most] or above `above`; preflight/values.py checks it."""
    return field(default=default, metadata={"least": least, "most": most, "above": above})


class EngineKind(Enum):
    auto = "auto"  # sglang where its package and a GPU are there, otherwise local
    sglang = "sglang"  # a process of its own with a copy of the weights, one for each rank
    local = "local"  # embedded, in this process, on the policy's own parameters


class Deterministic(Enum):
    auto = "auto"  # on the CPU; not on a GPU, where it costs about a third of sglang's speed
    always = "always"
    never = "never"  # tokens then differ from run to run


class LayoutKind(Enum):
    auto = "auto"  # trees on the CPU; on a GPU packed, for flash-attention
    padded = "padded"
    packed = "packed"
    trees = "trees"  # a group's prompt once, its completions as branches


class Precision(Enum):
    auto = "auto"  # bfloat16 on a GPU, float32 on the CPU
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"  # with a loss scale that adapts


class Offload(Enum):
    none = "none"
    optimizer = "optimizer"  # Adam's moments wait in host memory while the engine samples
    all = "all"  # the parameters' shards too


class Reference(Enum):
    none = "none"
    frozen = "frozen"  # a copy of the policy as it is when RL begins
    base = "base"  # the policy without its LoRA adapters: no copy


class OldLogprobs(Enum):
    behaviour = "behaviour"  # the engine's, as recorded at sampling
    recomputed = (
        "recomputed"  # the trainer's own before a batch's first update: what corrections compare with the engine's
    )


class KlEstimator(Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KlPlace(Enum):
    loss = "loss"
    reward = "reward"


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass
class TinyConfig:
    """Shape of the embedded model, used where model.path is null."""

    layers: int = bounded(2, least=1)
    hidden_size: int = bounded(128, least=1)
    intermediate_size: int = bounded(384, least=1)
    heads: int = bounded(4, least=1)
    kv_heads: int = bounded(2, least=1)
    head_dim: int = bounded(32, least=2)
    rope_theta: float = bounded(100.0, above=0)
    init_std: float = bounded(0.05, above=0)
    max_positions: int = 4096
    words: list[str] = field(default_factory=list)  # texts that become one token each


@dataclass
class ModelConfig:
    path: Optional[str] = None  # a Hugging Face folder on this disk; null: the embedded tiny model
    tiny: TinyConfig = field(default_factory=TinyConfig)


@dataclass
class EngineConfig:
    kind: EngineKind = EngineKind.auto
    slots: int = bounded(128, least=1)  # completions sampled at a time; the KV cache holds this many
    # of sglang alone:
    # neighbouring ranks of a node that are one engine, each with a part of the weights
    tensor_parallel: int = bounded(1, least=1)
    # share of a GPU's free memory for weights and KV cache; 0: what the trainer leaves
    memory_fraction: float = bounded(0.0, least=0, most=0.95)
    deterministic: Deterministic = Deterministic.auto  # a request's seed alone decides its tokens
    # seconds without an answer or progress after which an engine counts as dead
    timeout: float = bounded(300.0, above=0)
    start_timeout: float = bounded(1800.0, above=0)  # seconds until a new engine must be ready
    restarts: int = bounded(2, least=0)  # times a run that dead engines are started again
    arguments: dict[str, Any] = field(default_factory=dict)  # more of sglang.Engine's, by its names


@dataclass
class OptimizerConfig:
    """AdamW, gradient clipping and the learning rate's course."""

    lr: float = bounded(3e-6, above=0)
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = bounded(1e-8, above=0)
    weight_decay: float = bounded(0.0, least=0)  # of matrices; norms and biases have none
    warmup_steps: int = bounded(0, least=0)
    schedule: Schedule = Schedule.constant
    final_lr: float = bounded(0.1, least=0, most=1)  # share of lr that cosine and linear end at
    max_grad_norm: float = bounded(1.0, above=0)


@dataclass
class LoraConfig:
    """Train low-rank adapters W + (alpha / rank) · B A and leave the model's own weights as they are. Experts that are one fused parameter get none."""

    rank: int = bounded(0, least=0)  # 0: train all weights
    alpha: int = bounded(32, least=1)
    # names of modules; all-linear: each but the head
    targets: list[str] = field(default_factory=lambda: ["all-linear"])


@dataclass
class PolicyConfig:
    dtype: Precision = Precision.auto  # of forward and backward; parameters and moments are float32 always
    # ranks that share one copy of the parameters; 0: all of a node. Less than all: the groups are replicas
    shard: int = bounded(0, least=0)
    offload: Offload = Offload.none  # what waits in host memory while the engine samples
    activation_checkpointing: bool = False  # keep only each layer's input, compute the rest again in backward
    lora: LoraConfig = field(default_factory=LoraConfig)
    layout: LayoutKind = LayoutKind.auto
    row_tokens: int = bounded(2048, least=2)  # tokens of one packed row: what a forward/backward holds at a time
    max_bad_steps: int = bounded(3, least=1)  # steps in a row with a number that is not finite before the run ends


@dataclass
class KlConfig:
    """Distance from algo.reference as a price. k1, k2 and k3 estimate it from the sampled tokens: hybrid_rl/algo/kl.py."""

    coef: float = bounded(0.0, least=0)  # its weight; 0: the distance is only reported
    estimator: KlEstimator = KlEstimator.k3
    place: KlPlace = KlPlace.loss
    # in the loss: weighted by π/π_old, so that it stays unbiased as the policy moves; null: if a batch takes several
    # updates
    unbiased: Optional[bool] = None
    target: float = bounded(0.0, least=0)  # nats a token that coef is steered towards; 0: coef stays as it is
    # coef changes by at most 20 % / horizon a step: 1.2-fold in 10 steps, 7-fold in 100
    horizon: int = bounded(10, least=1)


@dataclass
class CriticConfig:
    """A model that predicts each token's return, for advantages that need one (gae, vtrace)."""

    path: Optional[str] = None  # a Hugging Face folder it begins as; null: the policy's
    # how far a prediction may move before its loss stops counting; 0: as far as it likes
    clip: float = bounded(0.2, least=0)
    warmup_steps: int = bounded(0, least=0)  # first RL steps in which it learns alone
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))


@dataclass
class AlgoConfig:
    """Parts are functions by `_target_`, their other keys are arguments; conf/algo/<part>/ has those that come along."""

    advantage: dict[str, Any] = field(default_factory=lambda: {"_target_": "hybrid_rl.algo.grpo.advantages"})
    loss: dict[str, Any] = field(default_factory=lambda: {"_target_": "hybrid_rl.algo.ppo_clip.loss"})
    aggregation: dict[str, Any] = field(default_factory=lambda: {"_target_": "hybrid_rl.algo.aggregation.token_mean"})
    # name: function, any number of them; of trainer and engine's mismatch
    correction: dict[str, Any] = field(default_factory=dict)
    # name: function, any number of them; which tokens an update learns from
    selection: dict[str, Any] = field(default_factory=dict)
    # optimizer steps that a pass over the batch takes, each on its share of the groups
    minibatches: int = bounded(1, least=1)
    # passes over a batch; with one minibatch and one epoch a step is exactly on-policy
    epochs: int = bounded(1, least=1)
    old_logprobs: OldLogprobs = OldLogprobs.behaviour  # what the ratio π/π_old is taken to
    # replace a group in which this is equal everywhere: outcome, reward (with penalties), parts (all of them), a
    # part's name; none
    silent_by: str = "outcome"
    mask_truncated: bool = False  # leave rollouts that reached rollout.max_tokens out of the loss
    # of rollout.max_tokens, at its end: tokens there cost reward, linearly more; 0: off
    overlong_share: float = bounded(0.0, least=0, most=1)
    overlong_penalty: float = bounded(1.0, least=0)  # what reaching rollout.max_tokens costs then
    entropy_coef: float = bounded(0.0, least=0)  # weight of the policy's entropy, which the loss then rewards
    reference: Reference = Reference.none  # the model that the policy's distance is measured from
    kl: KlConfig = field(default_factory=KlConfig)
    teacher: Optional[str] = None  # a Hugging Face folder with the same vocabulary, for advantage=opd
    critic: CriticConfig = field(default_factory=CriticConfig)


def unbiased_kl(algo: AlgoConfig) -> bool:
    """Whether the KL in the loss is weighted by the ratio."""
    return algo.epochs * algo.minibatches > 1 if algo.kl.unbiased is None else algo.kl.unbiased


@dataclass
class HandoverConfig:
    # weights that are whole at a time on their way to an engine with memory of its own
    bucket_mib: int = bounded(512, least=1)
    verify: bool = False  # compare engine and policy after every handover; the first of RL is always compared


@dataclass
class RolloutConfig:
    batch_size: int = bounded(128, least=1)  # rollouts that a step trains on
    # newest RL steps whose rollouts and evaluations stay on the disk, beside the first step's; 0: all
    keep_steps: int = bounded(100, least=0)
    group_size: int = bounded(16, least=1)  # of which so many answer the same task
    temperature: float = bounded(1.0, above=0)
    top_k: int = bounded(0, least=0)  # 0: off
    top_p: float = bounded(1.0, least=1e-06, most=1.0)  # 1: off
    max_tokens: int = bounded(128, least=1)  # sampled tokens of a completion
    max_prompt_tokens: int = bounded(512, least=1)
    max_replacements: int = bounded(4, least=0)  # rounds in which groups without a signal are replaced by new ones
    reward_workers: int = bounded(1, least=1)  # processes that score while others generate
    reward_timeout: float = bounded(10.0, above=0)  # seconds for one reward
    reward_start_timeout: float = bounded(60.0, above=0)  # seconds for a worker to load the reward
    # share of a step's rewards that may fail (raise, time out, …) before the run ends
    max_reward_failures: float = bounded(0.5, least=0, most=1)


@dataclass
class SftConfig:
    steps: int = bounded(100, least=0)  # 0: no warm-up
    batch_size: int = bounded(32, least=1)
    # share of the steps over which the longest example grows from shortest to longest
    curriculum: float = bounded(0.0, least=0, most=1)
    # share of each target's probability that is spread over the whole vocabulary
    label_smoothing: float = bounded(0.0, least=0, most=0.9)
    checkpoint_every: int = bounded(0, least=0)  # steps; 0: only at the end of the stage
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-5))


@dataclass
class RlConfig:
    steps: int = bounded(20, least=0)
    checkpoint_every: int = bounded(10, least=1)
    keep_checkpoints: int = bounded(2, least=1)  # the last so many
    # and the one of the step with the best evaluation; each step that is evaluated is saved then
    keep_best: bool = False
    eval_every: int = bounded(0, least=0)  # 0: only before and after the stage
    # steps in a row that train nothing (no signal, all masked) before the run ends with an error; 0: any number
    max_empty_steps: int = bounded(10, least=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CheckpointConfig:
    background: bool = True  # copy to host memory and write while the next step runs; false: wait for the disk
    timeout: float = bounded(900.0, above=0)  # seconds that writing one may take


class ExportDtype(Enum):
    source = "source"  # each weight's in the model folder that the run began with
    float32 = "float32"


@dataclass
class ExportConfig:
    dtype: ExportDtype = ExportDtype.source  # of the weights in final/; they are trained in float32


@dataclass
class EvalConfig:
    temperature: float = bounded(1.0, least=0)
    samples: int = bounded(1, least=1)  # completions a task; their mean counts
    max_tasks: int = bounded(0, least=0)  # 0: every held-out task
    # a sample with at least this reward is right: what pass@k counts
    pass_reward: float = bounded(1.0, least=-1000000.0, most=1000000.0)


@dataclass
class Config:
    name: str = ""  # the recipe's name, set by the recipe
    seed: int = bounded(0, least=0, most=2**63 - 1)
    # of the order in which tasks and demonstrations are drawn; null: seed
    data_seed: Optional[int] = bounded(None, least=0, most=2**63 - 1)
    device: str = "auto"  # auto, cpu, cuda
    ranks: int = bounded(0, least=0)  # processes that train together; 0: one for each visible GPU, one on the CPU
    # seconds without any progress after which a rank hangs, and the run ends
    rank_timeout: float = bounded(1800.0, above=0)
    # seconds from SIGTERM or Ctrl-C in which the running step ends and is saved; then the run is killed
    stop_timeout: float = bounded(600.0, above=0)
    # only operations that give the same bits every time: slower on a GPU, see docs/failures.md
    deterministic: bool = False
    threads: int = bounded(0, least=0)  # CPU threads of torch; 0: one for tiny models, all cores otherwise
    output_dir: str = "outputs"
    # never: a new run; auto: the newest run of this recipe, if it is unfinished, else a new one; must: auto, and an error if there is none;
    # or a run's folder, whose settings are taken: the command line then gives only what is to change
    resume: str = "never"
    dry_run: bool = False  # check everything, print the plan, stop
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    handover: HandoverConfig = field(default_factory=HandoverConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    # _target_: a function that returns hybrid_rl.data.TaskSets, the other keys are its arguments, but template_arguments: variables of the
    # model's chat template, like {enable_thinking: false}
    data: dict[str, Any] = field(default_factory=lambda: {"template_arguments": {}})
    reward: dict[str, Any] = field(default_factory=dict)  # _target_: a function (completion, task) → reward
    sft: SftConfig = field(default_factory=SftConfig)
    rl: RlConfig = field(default_factory=RlConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    export: ExportConfig = field(default_factory=ExportConfig)


def only_evaluates(config: Config) -> bool:
    """Whether a run trains nothing: the model stays what it was, so there is nothing to save or to export."""
    return not config.sft.steps and not config.rl.steps
