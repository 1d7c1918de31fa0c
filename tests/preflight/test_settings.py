"""Settings: every default can be overridden, and every bad one ends in one line that says what to do."""

import importlib.util
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.preflight.names import keys
from hybrid_rl.preflight.settings import load
from hybrid_rl.preflight.targets import check_saved_targets
from hybrid_rl.run import main

REVERSE = "+recipe=reverse"

# override(s) → what the line must contain
BAD = [
    ([REVERSE, "engine.memory_fraction=1"], "engine.memory_fraction=1.0 (command line): must be between 0 and 0.95"),
    ([REVERSE, "engine=local", "engine.tensor_parallel=2"], "engine.tensor_parallel=2 (command line): is a setting of engine=sglang; engine=local"),
    ([REVERSE, "ranks=3", "engine.tensor_parallel=2"], "engine.tensor_parallel=2 (command line): does not divide the 3 ranks"),
    ([REVERSE, "engine.arguments.tp=2"], "engine.arguments.tp=2 (command line): there is no such key"),
    ([REVERSE, "engine.timeout=0"], "engine.timeout=0.0 (command line): must be a number above 0"),
    ([], "no recipe was chosen; add +recipe=NAME, there are: alphabet_sort, "),
    (["+recipe=revers"], "recipe=revers (command line): there is no such choice; did you mean reverse?"),
    ([REVERSE, "rollout.group_sise=8"], "rollout.group_sise=8 (command line): there is no such key; did you mean rollout.group_size?"),
    ([REVERSE, "rolout.group_size=8"], "did you mean rollout.group_size?"),
    ([REVERSE, "+rl.foo=1"], "rl.foo=1 (command line): there is no such key"),
    ([REVERSE, "model=qwen"], "there are: qwen3, smollm2, tiny"),
    ([REVERSE, "rl.steps=["], "rl.steps=[ (command line): not of the form key=value"),
    ([REVERSE, "rollout.batch_size=many"], "rollout.batch_size=many (command line): Value 'many' of type 'str' could not be converted to Integer"),
    ([REVERSE, "rollout.batch_size=1.5"], "rollout.batch_size=1.5"),
    ([REVERSE, "dry_run=perhaps"], "dry_run=perhaps"),
    ([REVERSE, "policy.layout=tree"], "policy.layout=tree (command line): Invalid value 'tree', expected one of [auto, padded, packed, trees]"),
    ([REVERSE, "sweep.prune=true"], "sweep.prune=True (command line): compares evaluations between steps, and rl.eval_every=0 means none; set rl.eval_every"),
    ([REVERSE, "rl.keep_best=true"], "rl.keep_best=True (command line): compares evaluations, and rl.eval_every=0 means there are none between steps"),
    ([REVERSE, "stop_timeout=0"], "stop_timeout=0.0 (command line): must be a number above 0"),
    ([REVERSE, "checkpoint.timeout=0"], "checkpoint.timeout=0.0 (command line): must be a number above 0"),
    ([REVERSE, "rollout.group_size=15"], "does not divide rollout.batch_size=128; the nearest that does is 16"),
    ([REVERSE, "rollout.batch_size=100"], "rollout.group_size=16 (conf/recipe/reverse.yaml): does not divide rollout.batch_size=100; the nearest that does is 20"),
    ([REVERSE, "algo.minibatches=3"], "does not divide the 8 groups of a batch (whole groups stay together); the nearest that does is 2"),
    ([REVERSE, "rollout.group_size=0"], "rollout.group_size=0 (command line): must be at least 1"),
    ([REVERSE, "rollout.group_size=1"], "rollout.group_size=1 (command line): makes every group silent; use 2 or more, or algo.silent_by=none"),
    ([REVERSE, "rollout.group_size=1", "algo.silent_by=none"], "leaves hybrid_rl.algo.grpo.advantages nothing to compare with; use 2 or more"),
    ([REVERSE, "rollout.max_tokens=4000", "policy.row_tokens=2048"], "is longer than a row of policy.row_tokens=2048; at most "),
    ([REVERSE, "policy.row_tokens=16"], "set policy.row_tokens to"),
    ([REVERSE, "rollout.temperature=0"], "rollout.temperature=0.0 (command line): must be a number above 0"),
    ([REVERSE, "rollout.top_p=1.5"], "must be between 1e-06 and 1"),
    ([REVERSE, "rollout.oversample=0.5"], "rollout.oversample=0.5 (command line): must be a number of at least 1"),
    ([REVERSE, "rollout.oversample=inf"], "rollout.oversample=inf (command line): must be a number of at least 1"),
    (["+recipe=guess_number", "rollout.oversample=1.5"], "rollout.oversample=1.5 (command line): keeps answers from one step to the next, and environment._target_ makes conversations"),
    ([REVERSE, "rollout.max_staleness=-1"], "rollout.max_staleness=-1 (command line): must be at least 0"),
    ([REVERSE, "rollout.oversample=1.5", "algo.old_logprobs=recomputed"], "algo.old_logprobs=recomputed (command line): forgets which weights sampled the older tokens of rollout.oversample; use behaviour, or add algo/correction=tis"),
    ([REVERSE, "rollout.oversample=1.5", "algo/loss=reinforce"], "has no ratio, so it would take the tokens that rollout.oversample keeps from older weights for the policy's own"),
    ([REVERSE, "rl.optimizer.lr=-1"], "must be a number above 0"),
    ([REVERSE, "rl.optimizer.lr=nan"], "must be a number above 0"),
    ([REVERSE, "rl.optimizer.betas=[0.9]"], "must be two numbers from 0 to below 1"),
    ([REVERSE, "rl.steps=-1"], "must be at least 0"),
    ([REVERSE, "rl.optimizer.schedule=cosin"], "rl.optimizer.schedule=cosin"),
    ([REVERSE, "model.tiny.kv_heads=3"], "must divide model.tiny.heads=4"),
    ([REVERSE, "device=gpu"], "device=gpu (command line): there are: auto, cpu, cuda"),
    ([REVERSE, "resume=/no/such/run"], "must be never, auto, must, or the folder of a run"),
    ([REVERSE, "preset=qwen3"], "model.path= (conf/preset/qwen3.yaml): is not a Hugging Face model folder"),
    ([REVERSE, "model.path=/no/such/model"], "model.path=/no/such/model (command line): is not a Hugging Face model folder"),
    ([REVERSE, "data.max_lenght=20"], "data.max_lenght=20 (command line): there is no such key; did you mean max_length?"),
    ([REVERSE, "+data.colour=red"], "takes no such argument"),
    ([REVERSE, "data.weights={maths: 0}"], "data.weights={maths: 0} (command line): there is no such key; to add it, write +data.weights"),
    ([REVERSE, "+data.weights={maths: 0}"], "data.weights={'maths': 0} (command line): must be numbers above 0; a source"),
    ([REVERSE, "+data.weights={maths: much}"], "data.weights={'maths': 'much'} (command line): Value 'much' of type 'str' could not be converted to Float"),
    ([REVERSE, "+data.curriculum._target_=hybrid_rl.data.curriculum.pass_rates"], "data.curriculum._target_=hybrid_rl.data.curriculum.pass_rates (command line): hybrid_rl.data.curriculum defines no 'pass_rates'"),
    ([REVERSE, "+data.curriculum={_target_: hybrid_rl.data.curriculum.pass_rate, flor: 1}"], "pass_rate takes no such argument; did you mean floor?"),
    ([REVERSE, "data.weights=3"], "data.weights=3 (command line): must be a mapping, like {maths: 3, code: 1}"),
    ([REVERSE, "reward._target_=hybrid_rl.recipes.reverse.similar"], "defines no 'similar'; there are: load_tasks, similarity"),
    ([REVERSE, "reward._target_=no.such.module.f"], "there is no module 'no.such.module' on the Python path"),
    ([REVERSE, "reward._target_=tests.rewards.of_no_task"], "tests.rewards.of_no_task is called with (completion, task) and takes 1 arguments"),
    ([REVERSE, "reward._target_=tests.rewards.with_a_limit"], "reward.limit=None (default): is missing, and tests.rewards.with_a_limit needs it"),
    ([REVERSE, "rollout.batch_size=1"], "rollout.group_size=16 (conf/recipe/reverse.yaml): does not divide rollout.batch_size=1; the nearest that does is 1"),
    ([REVERSE, "algo/advantage=pass_at_k", "rollout.group_size=2"], "algo.advantage.k=4 (conf/algo/advantage/pass_at_k.yaml): must be from 2 to rollout.group_size=2"),
    ([REVERSE, "algo/advantage=pass_at_k", "algo.advantage.k=null"], "algo.advantage.k=None (command line): must be an integer"),
    ([REVERSE, "algo/correction=tis", "algo.old_logprobs=recomputed", "algo.correction.tis.level=seq"], "hybrid_rl.algo.tis.correct knows 'token', 'sequence'"),
    ([REVERSE, "algo/selection=[top_entropi]"], "there is no such choice; there are: opsm, top_entropy"),
    ([REVERSE, "algo/selection=top_entropy", "algo.selection.top_entropy.share=2"], "algo.selection.top_entropy.share=2 (command line): must be at least 0 and at most 1"),
    ([REVERSE, "algo.loss.clip_low=-1"], "algo.loss.clip_low=-1 (command line): must be at least 0"),
    ([REVERSE, "algo.loss.clip_high=nan"], "algo.loss.clip_high=nan (command line): must be a number"),
    ([REVERSE, "algo.loss.clip_high=2.5"], "algo.loss.dual_clip=3.0 (conf/algo/loss/ppo_clip.yaml): must be 0 (off) or more than 1 + clip_high = 3.5"),
    ([REVERSE, "algo/advantage=gae", "algo.advantage.whiten=1"], "algo.advantage.whiten=1 (command line): must be true or false"),
    ([REVERSE, "algo/advantage=gae", "algo.advantage.critic_lam=2"], "algo.advantage.critic_lam=2 (command line): must be at least 0 and at most 1"),
    ([REVERSE, "algo/advantage=vtrace", "algo.advantage.rho_bar=0.5"], "algo.advantage.rho_bar=0.5 (command line): must be at least c_bar = 1"),
    ([REVERSE, "algo/correction=seq_mask", "algo.old_logprobs=recomputed", "algo.correction.seq_mask.low=2"], "algo.correction.seq_mask.low=2 (command line): must be from 0 to high = 1.01"),
    ([REVERSE, "algo=gdpo", "algo.reference=frozen", "algo.kl.coef=0.1", "algo.kl.place=reward"], "is subtracted from the whole reward, and gdpo uses only its parts"),
    ([REVERSE, "algo.reference=frozen", "algo.kl.coef=0.1", "algo.kl.place=reward", "algo.kl.unbiased=true"], "algo.kl.unbiased=True (command line): applies to a KL in the loss"),
    ([REVERSE, "algo=opd", "algo.teacher=/no/such", "algo.overlong_share=0.2"], "algo.overlong_share=0.2 (command line): changes the reward, which algo.advantage does not use"),
    ([REVERSE, "algo=opd", "algo.teacher=/no/such", "algo.reference=frozen", "algo.kl.coef=0.1", "algo.kl.place=reward"], "changes the reward, which algo.advantage does not use"),
    ([REVERSE, "algo.loss.clip_lo=0.1"], "there are: _target_, clip_low, clip_high"),
    ([REVERSE, "algo=gpro"], "algo=gpro (command line): there is no such choice; did you mean grpo?"),
    ([REVERSE, "algo/loss=gsp"], "algo/loss=gsp (command line): there is no such choice; did you mean gspo?"),
    ([REVERSE, "algo/correction=[tis,icepo]"], "there is no such choice; there are: icepop, k3_mask, seq_mask, tis"),
    ([REVERSE, "algo/loss=gspo", "algo.loss.dual_clip=3"], "there is no such key"),
    ([REVERSE, "algo/correction=tis"], "algo.correction={'tis': "),
    ([REVERSE, "algo/correction=tis", "algo.old_logprobs=recomputed", "rollout.top_p=0.9"], "rollout.top_k or rollout.top_p truncates the sampled one"),
    ([REVERSE, "algo/correction=tis", "algo.old_logprobs=recomputed", "+algo.correction.tis.caps=2"], "tis.correct takes no such argument; there are: "),
    ([REVERSE, "algo=opd"], "algo.teacher=None (default): is missing, and algo.advantage needs it; set algo.teacher=/path/to/a/model/folder"),
    ([REVERSE, "algo.teacher=/no/such/model"], "algo.teacher=/no/such/model (command line): is not used by algo.advantage; use algo=opd, or leave it out"),
    ([REVERSE, "algo=opd", "algo.teacher=/no/such/model"], "algo.teacher=/no/such/model (command line): is not a Hugging Face model folder on this disk"),
    ([REVERSE, "eval.against=/no/such/model"], "eval.against=/no/such/model (command line): is of evaluations alone: python -m hybrid_rl.evaluate"),
    ([REVERSE, "eval.against=/no/such/model", "sft.steps=0", "rl.steps=0"], "eval.against=/no/such/model (command line): is not a Hugging Face model folder on this disk (one with a config.json); set eval.against=/path"),
    ([REVERSE, "reward_model.path=/no/such/model"], "reward_model.path=/no/such/model (command line): is not a Hugging Face model folder on this disk (one with a config.json); set reward_model.path="),
    ([REVERSE, "algo.critic.path=/no/such/model"], "algo.critic.path=/no/such/model (command line): is not a Hugging Face model folder on this disk"),
    ([REVERSE, "algo.kl.coef=0.1", "algo.reference=frozen", "algo.kl.estimator=k1", "algo.minibatches=1"], "has no gradient on average; use k2 or k3, algo.kl.unbiased=true, or algo.kl.place=reward"),
    ([REVERSE, "algo.kl.target=0.1", "algo.reference=frozen"], "steers algo.kl.coef, which is 0 and would stay 0"),
    ([REVERSE, "algo.loss.dual_clip=1.1"], "algo.loss.dual_clip=1.1 (command line): must be 0 (off) or more than 1 + clip_high = 1.2; 3 is usual"),
    ([REVERSE, "algo.epochs=0"], "algo.epochs=0 (command line): must be at least 1"),
    ([REVERSE, "algo.overlong_share=2"], "algo.overlong_share=2.0 (command line): must be between 0 and 1"),
    ([REVERSE, "policy.lora.rank=-1"], "policy.lora.rank=-1 (command line): must be at least 0"),
    ([REVERSE, "policy.lora.rank=4", "policy.lora.alpha=0"], "policy.lora.alpha=0 (command line): must be at least 1"),
    ([REVERSE, "policy.lora.rank=4", "policy.lora.targets=[]"], "policy.lora.targets=[] (command line): names no module; all-linear means all of them"),
    ([REVERSE, "algo.reference=base"], "the policy without its adapters, and policy.lora.rank=0 means it has none; use frozen"),
    ([REVERSE, "algo.reference=frosen"], "algo.reference=frosen"),
    ([REVERSE, "algo.kl.coef=0.1"], "algo.kl.coef=0.1 (command line): needs a model to measure the distance from; set algo.reference=frozen"),
    ([REVERSE, "algo.kl.coef=-0.1", "algo.reference=frozen"], "algo.kl.coef=-0.1 (command line): must be a number of at least 0"),
    ([REVERSE, "rl.optimizer.lr=1e-5,2e-5"], "rl.optimizer.lr=1e-5,2e-5 (command line): several values are a sweep, which needs -m; a text with a comma needs quotes"),
    ([REVERSE, "seed=0,1", "rl.steps=2,3"], "seed=0,1 (command line): several values are a sweep, which needs -m"),
    ([REVERSE, "seed=range(1,3)"], "seed=range(1,3) (command line): several values are a sweep, which needs -m"),
    ([REVERSE, "algo/loss=glob(*)"], "algo/loss=glob(*) (command line): several values are a sweep, which needs -m"),
    ([REVERSE, "~sft"], "~sft (command line): a setting cannot be removed, only changed: sft=VALUE"),
    ([REVERSE, "~rl.steps=20"], "~rl.steps=20 (command line): a setting cannot be removed, only changed"),
    ([REVERSE, "~model"], "~model (command line): a setting cannot be removed, only changed"),
    ([REVERSE, "sft=null"], "sft=null (command line): must not be null"),
    ([REVERSE, "rl.optimizer.betas=null"], "rl.optimizer.betas=null (command line): must not be null"),
    ([REVERSE, "rl.steps=???"], "rl.steps=??? (command line): has no value; set rl.steps"),
    ([REVERSE, "name=???"], "name=??? (command line): has no value; set name"),
    ([REVERSE, f"seed={10**23}"], f"seed={10**23} (command line): must be at most {2**63 - 1}"),
    ([REVERSE, "data_seed=-1"], "data_seed=-1 (command line): must be at least 0"),
    ([REVERSE, f"rl.steps={10**30}"], f"rl.steps={10**30} (command line): must be at most {2**31 - 1}"),
    ([REVERSE, "name=../elsewhere"], "name=../elsewhere (command line): must be a plain name"),
    ([REVERSE, "output_dir="], "output_dir= (command line): must be a folder; output_dir=. is the current one"),
    (["recipe=mine"], "recipe=mine (command line): there is no such choice; there are: alphabet_sort, arithmetic, code, countdown, format, gsm8k, guess_number, judge, reasoning_gym, reverse, reverse_opd, sorting; a recipe is chosen with +recipe=NAME"),
    (["recipe=reverse"], "recipe=reverse (command line): a recipe is added to the settings: +recipe=reverse"),
    ([REVERSE, "algo.advantage=gae"], "algo.advantage=gae (command line): a part is chosen with a slash: algo/advantage=gae"),
    ([REVERSE, "algo.loss=ppo"], "a part is chosen with a slash: algo/loss=ppo"),
    ([REVERSE, "algo.correction=[tis]"], "a part is chosen with a slash: algo/correction=[tis]"),
    ([REVERSE, "algo/loss=ppo"], "algo/loss=ppo (command line): there is no such choice; did you mean ppo_clip?"),
    ([REVERSE, "rollout/batch_size=3"], "there is no such key; did you mean rollout.batch_size?"),
    ([REVERSE, "logger=wandb"], "logger=wandb (command line): there is no such key; all of them: hybrid_rl/config.py, or --cfg job"),
    ([REVERSE, "++x=1"], "x=1 (command line): there is no such key; all of them: hybrid_rl/config.py"),
    ([REVERSE, "+rl.stepz=3"], "rl.stepz=3 (command line): there is no such key; did you mean rl.steps?"),
    ([REVERSE, "+seed=3"], "+seed (command line): it is there already; leave the + out"),
    ([REVERSE, "+algo=dapo"], "+algo (command line): it is there already; leave the + out"),
    ([REVERSE, "reward.limit=3"], "reward.limit=3 (command line): there is no such key; there are: _target_; to add it, write +reward.limit=3"),
    ([REVERSE, "engine.arguments.tp=2"], "there is no such key; to add it, write +engine.arguments.tp=2"),
    ([REVERSE, "reward._target_=3"], "reward._target_=3 (command line): must be the path of a function: module.function"),
    ([REVERSE, "reward._target_=f"], "reward._target_=f (command line): must be the path of a function: module.function"),
    ([REVERSE, "reward._target_=null"], "reward._target_=None (command line): names no function"),
    ([REVERSE, "algo.advantage._target_=3"], "algo.advantage._target_=3 (command line): must be the path of a function: module.function"),
    ([REVERSE, "resume="], "resume= (command line): must be never, auto, must, or the folder of a run"),
    ([REVERSE, "resume=/etc/passwd"], "resume=/etc/passwd (command line): must be never, auto, must, or the folder of a run"),
    ([REVERSE, "algo.kl.coef=nan", "algo.reference=frozen"], "must be a number of at least 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "expected"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_settings(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message


def test_adapters_without_peft(monkeypatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, find=importlib.util.find_spec: None if name == "peft" else find(name)
    )
    assert load([REVERSE]).policy.lora.rank == 0
    with pytest.raises(
        ConfigError, match=r"policy.lora.rank=4 \(command line\): .* not installed; pip install -e '.\[lora\]'$"
    ):
        load([REVERSE, "policy.lora.rank=4"])


def test_every_default_can_be_overridden_without_plus():
    """By its own value, so that the types fit; keys that are sections or functions' arguments aside."""
    schema = OmegaConf.structured(Config)
    config = load([REVERSE])
    leaves = [
        k
        for k in keys(schema)
        if not OmegaConf.is_config(OmegaConf.select(schema, k)) or OmegaConf.is_list(OmegaConf.select(schema, k))
    ]
    assert len(leaves) > 60
    values = OmegaConf.to_container(config, enum_to_str=True)
    given = {}
    for key in leaves:
        value = values
        for part in key.split("."):
            value = value[part]
        if key not in (
            "name",
            "model.path",
            "model.tiny.words",
            "algo.teacher",
            "algo.critic.path",
            "data_seed",
            "algo.kl.unbiased",
            "data.tools",
            "eval.against",
            "reward_model.path",
        ):
            given[key] = value
    assert load([REVERSE, *(f"{key}={value}" for key, value in given.items())]) == config


def test_the_recipe_is_the_worked_example():
    config = load([REVERSE])
    assert (config.rollout.batch_size, config.rollout.group_size, config.rl.steps) == (128, 16, 20)
    assert (config.rollout.temperature, config.rollout.max_tokens, config.policy.row_tokens) == (1.0, 128, 0)


def test_the_model_brings_its_learning_rates(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    config = load([REVERSE, "preset=qwen3", f"model.path={tmp_path}"])
    assert (config.rl.optimizer.lr, config.sft.optimizer.lr) == (3e-6, 2e-5)
    assert load([REVERSE, "preset=qwen3", f"model.path={tmp_path}", "rl.optimizer.lr=1e-5"]).rl.optimizer.lr == 1e-5


def cli(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "hybrid_rl.run", *arguments], capture_output=True, text=True, timeout=60, **kwargs
    )


def test_the_command_reports_in_one_line_and_exits_with_2(tmp_path):
    result = cli(REVERSE, "rollout.group_sise=8", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert (
        result.stderr
        == "hybrid_rl: rollout.group_sise=8 (command line): there is no such key; did you mean rollout.group_size?\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([REVERSE, "hydra.run.dir=/proc/x"], "hydra.run.dir=/proc/x: cannot be written to: No such file or directory; choose another folder"),
        ([REVERSE, "hydra.run.dir={file}"], "hydra.run.dir={file}: {file} is a file; choose another folder"),
        ([REVERSE, "hydra.run.dir={file}/in"], "hydra.run.dir={file}/in: {file} is a file; choose another folder"),
        ([REVERSE, "output_dir=/proc/x"], "output_dir=/proc/x: cannot be written to: No such file or directory; choose another folder"),
        ([REVERSE, "-m", "hydra.sweep.dir=/proc/x", "seed=0,1"], "hydra.sweep.dir=/proc/x: cannot be written to: No such file or directory; choose another folder"),
        ([REVERSE, "-m", "hydra/launcher=nowhere", "seed=0,1"], "hydra/launcher=nowhere (command line): there is no such launcher; install its plugin, perhaps hydra-nowhere-launcher (pip install -e '.[sweeps]' has joblib, submitit and optuna)"),
        ([REVERSE, "hydra.run.dir=null"], "hydra.run.dir=null (command line): must not be null"),
        ([REVERSE, "hydra.jog.chdir=true"], "hydra.jog.chdir (command line): Hydra has no such key"),
        ([REVERSE, "hydra=3"], "Config group override must be a string or a list. Got int"),
        ([REVERSE, "--config-name=mine"], "--config-name=mine: is not supported; put your own settings into a recipe: --config-dir FOLDER +recipe=NAME"),
        ([REVERSE, "-m", "resume=.", "seed=0,1"], "resume=.: a sweep starts its own runs; go on with one of them without -m"),
        ([REVERSE, f"hydra.run.dir=/tmp/{'x' * 300}"], f"hydra.run.dir=/tmp/{'x' * 300}: cannot be written to: File name too long; choose another folder"),
        ([f"resume=/tmp/{'x' * 300}"], f"resume=/tmp/{'x' * 300} (command line): must be never, auto, must, or the folder of a run"),
        (["hydra.run.dir=elsewhere", "resume=."], "hydra.run.dir=elsewhere: resume=. names another folder; leave one of them out"),
        ([REVERSE, "hydra.run.dir={folder}", "resume=must"], "resume=must: there is no run in {folder} to go on with"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_folders_and_hydra_s_own_settings(tmp_path, monkeypatch, capsys, arguments, expected):
    (tmp_path / "file").write_text("")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(load([REVERSE])))
    monkeypatch.chdir(tmp_path)
    places = {"file": tmp_path / "file", "folder": tmp_path / "new"}
    assert main([a.format(**places) for a in arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == f"hybrid_rl: {expected.format(**places)}\n"


def test_one_bad_job_stops_a_sweep_before_it_starts(tmp_path):
    result = cli(REVERSE, "-m", "seed=0,1", "rollout.group_size=16,15", cwd=tmp_path)
    assert result.returncode == 2
    assert "rollout.group_size=15" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_settings_are_checked_before_torch_is_loaded():
    code = (
        "import sys\nfrom hybrid_rl.preflight.settings import load\n"
        f"load(['{REVERSE}'])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_the_resolved_configuration_is_shown(tmp_path):
    result = cli(REVERSE, "--cfg", "job", "--resolve", cwd=tmp_path)
    assert result.returncode == 0
    assert OmegaConf.create(result.stdout).rollout.batch_size == 128


def test_a_folder_of_ones_own_recipes(tmp_path):
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\nname: mine\ndata: {_target_: hybrid_rl.data.files.load_tasks, rl: a.jsonl, eval: b.jsonl}\nrl: {steps: 7}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(text + "reward: {_target_: hybrid_rl.recipes.reverse.similarity}\n")
    assert load(["+recipe=mine"], tmp_path).rl.steps == 7
    (tmp_path / "recipe" / "code.yaml").write_text(text)
    with pytest.raises(
        ConfigError, match=r"hybrid_rl has a recipe code too, which would be used; rename .*/recipe/code.yaml$"
    ):
        load(["+recipe=code"], tmp_path)
    with pytest.raises(ConfigError, match="did you mean mine"):
        load(["+recipe=min"], tmp_path)


PARTS = """# @package _global_
name: mine
data: {_target_: hybrid_rl.data.files.load_tasks, rl: a.jsonl, eval: b.jsonl}
reward:
  right: {_target_: hybrid_rl.rewards.numeric, within: boxed, weight: 2}
  form: {_target_: hybrid_rl.rewards.matches, pattern: ".*", weight: 0.1, sources: [maths]}
  gold: {_target_: hybrid_rl.rewards.MathVerify, weight: 0}
"""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("reward.right._target_=hybrid_rl.rewards.maths.numbers", r"reward.right._target_=.*: hybrid_rl.rewards.maths defines no 'numbers'"),
        ("+reward.right.weigth=1", r"reward.right.weigth=1 .*: hybrid_rl.rewards.maths.numeric takes no such argument"),
        ("+reward.gold.second=1", r"reward.gold.second=1 .*: hybrid_rl.rewards.maths.MathVerify takes no such argument"),
        ("reward.right.weight=much", r"reward.right.weight=much \(command line\): must be a number; 0: logged and not paid"),
        ("reward.right.weight=.nan", r"reward.right.weight=.*: must be a number"),
        ("reward.form.sources=maths", r"reward.form.sources=maths \(command line\): must be a list of sources"),
        ("reward.gold=0.5", r"reward.gold=0.5 \(command line\): must be a part of the reward, like \{_target_: module.function, weight: 1\}"),
        ("reward={right:{weight:0}}", r"reward=.*: pays nothing: every weight is 0"),
    ],
)  # fmt: skip
def test_the_parts_of_a_reward_are_checked(override, expected, tmp_path):
    (tmp_path / "recipe").mkdir()
    nothing = override.startswith("reward={")
    text = PARTS.replace("weight: 2", "weight: 0").replace("weight: 0.1", "weight: 0") if nothing else PARTS
    (tmp_path / "recipe" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"^{expected}"):
        load(["+recipe=mine", *([] if nothing else [override])], tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")
def test_an_engine_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"engine.kind=.*SGLang is not installed; pip install -e '\.\[sglang\]', or engine=local"
    ):
        load([REVERSE, "engine=sglang"])


@pytest.mark.parametrize("target", ["again", "partial", "Class.method", "in_a_block", "wrapped"])
def test_functions_that_only_running_a_module_would_show_are_taken(target):
    load([REVERSE, f"reward._target_=tests.rewards_elsewhere.{target}"])


@pytest.mark.parametrize(
    "more", [["reward._target_=math.fsum"], ["reward._target_=tests.rewards.with_a_limit", "+reward._args_=[1,2,3]"]]
)
def test_functions_that_cannot_be_looked_into_are_taken(more):
    load([REVERSE, *more])


@pytest.mark.parametrize("engine", ["sglang", "auto"])
def test_a_run_that_must_repeat_itself_does_not_go_by_sglangs_clock(monkeypatch, engine) -> None:
    monkeypatch.setattr("hybrid_rl.preflight.values.unusable", lambda: "")
    wanted = [REVERSE, f"engine.kind={engine}", "deterministic=true", "rollout.oversample=1.5"]
    with pytest.raises(ConfigError, match=r"rollout\.oversample=1\.5 \(command line\): lets SGLang's own clock decide"):
        load(wanted)
    load([*wanted[:1], "engine.kind=local", *wanted[2:]])
    load(wanted[:-1])


def test_k1_is_a_loss_where_it_is_unbiased():
    load(
        [REVERSE, "algo.kl.coef=0.1", "algo.reference=frozen", "algo.kl.estimator=k1"]
    )  # four updates a batch: weighted by the ratio


OWN = """import torch  # not loaded by a check
NEEDS: tuple[str, ...] = ("teacher_logprobs",)
BOUNDS = {"power": (0, None)}

def refuses(own: dict[str, Undefined], run: Undefined) -> Undefined:
    if own["power"] > run.rollout.group_size:
        yield "power", f"is above {run.rollout.group_size}"
    if run.algo.epochs > 1:
        yield "algo.epochs", "must be 1"

def advantages(batch, power: float = 1.0):
    return batch.outcomes
"""


@pytest.mark.parametrize(
    ("source", "overrides", "expected"),
    [
        (OWN, [], "algo.teacher=None (default): is missing"),
        (OWN.replace("teacher_logprobs", "teacher"), [], "NEEDS of own_part names teacher; there are: values, greedy"),
        (OWN.replace('("teacher_logprobs",)', "tuple()"), [], "NEEDS and BOUNDS of own_part must be written out"),
        (OWN.replace("teacher_logprobs", "group"), ["+algo.advantage.power=-1"], "algo.advantage.power=-1 (command line): must be at least 0"),
        (OWN.replace("teacher_logprobs", "group"), ["+algo.advantage.power=null"], "algo.advantage.power=None (command line): must be a number"),
        (OWN.replace("teacher_logprobs", "group"), ["+algo.advantage.power=17"], "algo.advantage.power=17 (command line): is above 16"),
        (OWN.replace("teacher_logprobs", "group"), ["algo.epochs=2"], "algo.epochs=2 (command line): must be 1"),
        (OWN.replace("teacher_logprobs", "group").replace("if run.", "if torch.").replace('own["power"] >', "1 >"), [],
         "refuses(own, run) of own_part raised NameError: name 'torch' is not defined; it may use its two arguments and builtins alone"),
    ],
)  # fmt: skip
def test_a_part_of_the_users_own_states_what_it_needs_and_refuses(source, overrides, expected, tmp_path, monkeypatch):
    (tmp_path / "own_part.py").write_text(source)
    (tmp_path / "algo" / "advantage").mkdir(parents=True)
    (tmp_path / "algo" / "advantage" / "own.yaml").write_text("_target_: own_part.advantages\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load([REVERSE, "algo/advantage=own", *overrides], tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_is_no_dual_clip():
    assert load([REVERSE, "algo.loss.dual_clip=null"]).algo.loss.dual_clip is None


def test_a_recipe_that_is_not_python_is_named(tmp_path, monkeypatch):
    (tmp_path / "not_python.py").write_text("def reward(completion, task):\n    return 1.0 if\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"reward\._target_=not_python\.reward .*/not_python\.py is not Python: .* line 2\)"
    ):
        load([REVERSE, "reward._target_=not_python.reward"])


def test_the_rewards_of_hybrid_rl_are_its_own_parts(tmp_path):
    """A saved run may name them, as its package offers them."""
    check_saved_targets({"reward": {"a": {"_target_": "hybrid_rl.rewards.exact"}}}, tmp_path, set())
    with pytest.raises(ConfigError, match="is not defined by hybrid_rl's parts"):
        check_saved_targets({"reward": {"_target_": "hybrid_rl.rewards.urllib"}}, tmp_path, set())
    for function in ("os.system", "tests.composed_rewards.trl_text"):
        saved = {"reward": {"_target_": "hybrid_rl.rewards.Trl", "function": function}}
        if function == "os.system":
            with pytest.raises(ConfigError, match=r"function=os\.system is not defined by hybrid_rl's parts"):
                check_saved_targets(saved, tmp_path, set())
        else:
            check_saved_targets(saved, tmp_path, set())


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.rl={rows:{_target_:tests.data.test_sources.row}}", "data.rl.rows._target_=.*: tests.data.test_sources defines no 'row'"),
        ("data.rl=[{rows:{_target_:tests.data.test_sources.rows}}]", r"data.rl\[0\].rows.count=.*: is missing, and tests.data.test_sources.rows needs it"),
    ],
)  # fmt: skip
def test_functions_inside_the_data_are_checked(override, expected, tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(PARTS)
    with pytest.raises(ConfigError, match=f"^{expected}"):
        load(["+recipe=mine", override], tmp_path)
