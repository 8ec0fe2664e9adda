"""Bad input, and the whole message that a user reads for it.

Each row: files of the working directory, arguments after `muster run`, environment, and every line
after the first of what goes to stderr. Nothing is started and the exit code is 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launch.cli import USAGE_ERROR, main
from launch.config import load_run_config
from launch.machine import Machine
from launch.settings.errors import ConfigError

NO_CUDA = Machine(has_cuda=False)


@dataclass(frozen=True)
class Row:
    """One mistake, or several at once."""

    name: str
    says: list[str]
    argv: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


def in_file(name: str, text: str, *says: str) -> Row:
    return Row(name, list(says), ["@", "a.toml"], {"a.toml": text})


def by_flags(name: str, argv: str, *says: str) -> Row:
    return Row(name, list(says), argv.split())


ROWS = [
    # -- files
    Row(
        "missing file",
        ["quikstart.toml: no such file; did you mean quickstart.toml?"],
        ["@", "quikstart.toml"],
        {"quickstart.toml": ""},
    ),
    Row(
        "missing file with nothing like it",
        ["mine.toml: no such file; . has abc.json, abc.toml"],
        ["@", "mine.toml"],
        {"abc.toml": "", "abc.json": "{}"},
    ),
    by_flags(
        "missing folder", "@ conf/a.toml", "conf/a.toml: no such file (and no directory conf)"
    ),
    by_flags("mark without a file", "@", "@: expected the name of a file after it"),
    in_file(
        "broken TOML",
        "seed = 1\nname = = 2\n",
        "a.toml: is not valid TOML: line 2, column 8: Invalid value",
    ),
    in_file(
        "broken TOML at its end",
        "[model",
        "a.toml: is not valid TOML: line 1, column 7: "
        "Expected ']' at the end of a table declaration",
    ),
    Row(
        "broken JSON",
        ["a.json: is not valid JSON: line 1, column 10: Expecting value"],
        ["@", "a.json"],
        {"a.json": '{"seed": }'},
    ),
    Row(
        "JSON that is no object",
        ["a.json: is not a JSON object"],
        ["@", "a.json"],
        {"a.json": "[1]"},
    ),
    # -- keys that do not exist
    in_file(
        "unknown key",
        "[orchestrator]\nmax_stepz = 60",
        "a.toml: orchestrator.max_stepz = 60: no such key; did you mean `orchestrator.max_steps`?",
    ),
    in_file(
        "known key in the wrong place",
        "group_size = 4",
        "a.toml: group_size = 4: no such key; did you mean `orchestrator.rollouts.group_size`?",
    ),
    in_file(
        "unknown key with nothing like it",
        "[model]\nzzz = true",
        "a.toml: model.zzz = true: no such key; `model` has path, dtype, max_model_len",
    ),
    in_file(
        "unknown section",
        "[weights_broadcast]\nbucket_mb = 1",
        'a.toml: weights_broadcast = {"bucket_mb": 1}: no such key; '
        "did you mean `weight_broadcast`?",
    ),
    by_flags(
        "unknown flag",
        "--orchestrator.max-step 3",
        '--orchestrator.max-step: orchestrator.max_step = "3": no such key; '
        "did you mean `orchestrator.max_steps`?",
    ),
    Row(
        "unknown variable",
        [
            'MUSTER_ORCHESTRATOR__MAX_STEP: orchestrator.max_step = "3": no such key; '
            "did you mean `orchestrator.max_steps`?"
        ],
        environ={"MUSTER_ORCHESTRATOR__MAX_STEP": "3"},
    ),
    # -- types
    in_file("text for an integer", 'seed = "1"', 'a.toml: seed = "1": expected an integer'),
    in_file("true for an integer", "seed = true", "a.toml: seed = true: expected an integer"),
    in_file(
        "number for an integer",
        "[orchestrator]\nmax_steps = 2.0",
        "a.toml: orchestrator.max_steps = 2.0: expected an integer",
    ),
    in_file("integer for a text", "name = 5", "a.toml: name = 5: expected a text"),
    in_file("value for a section", 'model = "tiny"', 'a.toml: model = "tiny": expected a section'),
    in_file(
        "one value for a list",
        "[wandb]\ntags = 5",
        "a.toml: wandb.tags = 5: expected a list",
    ),
    in_file(
        "wrong item of a list",
        '[wandb]\ntags = ["a", 5]',
        "a.toml: wandb.tags[1] = 5: expected a text",
    ),
    by_flags(
        "flag of the wrong type",
        "--orchestrator.max-steps=sixty",
        '--orchestrator.max-steps: orchestrator.max_steps = "sixty": expected an integer',
    ),
    Row(
        "variable of the wrong type",
        [
            'MUSTER_TRAINER__OPTIMIZER__LEARNING_RATE: trainer.optimizer.learning_rate = "fast": '
            "expected a number"
        ],
        environ={"MUSTER_TRAINER__OPTIMIZER__LEARNING_RATE": "fast"},
    ),
    # -- values
    in_file("below the range", "seed = -1", "a.toml: seed = -1: expected at least 0"),
    in_file(
        "above the range",
        "[weight_broadcast]\nbucket_mb = 100000",
        "a.toml: weight_broadcast.bucket_mb = 100000: expected at most 4096",
    ),
    in_file(
        "no time at all",
        "[weight_broadcast]\njoin_timeout_s = 0",
        "a.toml: weight_broadcast.join_timeout_s = 0: expected a number above 0",
    ),
    in_file(
        "for ever",
        "[weight_broadcast]\njoin_timeout_s = inf",
        "a.toml: weight_broadcast.join_timeout_s = Infinity: expected a finite number",
    ),
    in_file(
        "none of the words",
        '[wandb]\nmode = "of-line"',
        'a.toml: wandb.mode = "of-line": expected one of offline, online, disabled; '
        'did you mean "offline"?',
    ),
    in_file(
        "type of deployment",
        '[deployment]\ntype = "slurm"',
        'a.toml: deployment.type = "slurm": type = "slurm" is not part of this version: '
        'use type = "local" on one machine',
    ),
    # -- the command line itself
    by_flags(
        "file without its mark",
        "a.toml",
        'unexpected argument "a.toml"; files are given as `@ a.toml`',
    ),
    by_flags(
        "value without its flag",
        "sixty",
        'unexpected argument "sixty"; values are given as `--section.key sixty`',
    ),
    by_flags("flag without a value", "--seed", "--seed: expected a value after it"),
    by_flags(
        "list without values",
        "--deployment.engine-groups --seed 1",
        "--deployment.engine-groups: expected values after it; `[]` is the empty list",
    ),
    by_flags(
        "switch-off with a value",
        "--no-trainer.checkpoint.resume=false",
        '--no-trainer.checkpoint.resume: takes no value, got "false"',
    ),
    # -- what does not fit together
    in_file(
        "shared value contradicted",
        "seed = 1\n[trainer]\nseed = 2",
        "a.toml: trainer.seed = 2 disagrees with seed = 1",
    ),
    Row(
        "shared value contradicted from elsewhere",
        [
            "MUSTER_TRAINER__MODEL__PATH, --model.path: "
            'trainer.model.path = "b" disagrees with model.path = "a"'
        ],
        ["--model.path", "a"],
        environ={"MUSTER_TRAINER__MODEL__PATH": "b"},
    ),
    in_file(
        "default contradicted",
        '[orchestrator.model]\npath = "b"',
        'a.toml: orchestrator.model.path = "b" disagrees with model.path = "tiny" (default)',
    ),
    by_flags(
        "steps under two names",
        "--trainer.max-steps 5 --orchestrator.max-steps 6",
        "--trainer.max-steps, --orchestrator.max-steps: "
        "trainer.max_steps = 5 disagrees with orchestrator.max_steps = 6",
    ),
    by_flags(
        "groups under two names",
        "--deployment.engine-groups 0 1 --orchestrator.model.client.admin-engine-groups 0 0",
        "--orchestrator.model.client.admin-engine-groups, --deployment.engine-groups: "
        "orchestrator.model.client.admin_engine_groups = [0, 0] disagrees with "
        "deployment.engine_groups = [0, 1]",
    ),
    by_flags(
        "port that the launcher chooses",
        "--trainer.port 5000",
        "--trainer.port: trainer.port = 5000: the launcher chooses it for each run; "
        "set it for a process that you start alone",
    ),
    by_flags(
        "group without a member",
        "--deployment.engine-groups 0 2",
        "--deployment.engine-groups: deployment.engine_groups = [0, 2]: engine_groups = [0, 2] "
        "must name every group from 0 to the highest, one entry an engine",
    ),
    in_file(
        "counts against groups",
        "[deployment]\nnum_groups = 3\nengine_groups = [0, 1]",
        "a.toml: deployment: num_groups = 3 disagrees with engine_groups = [0, 1], which has 2",
    ),
    in_file(
        "too few ports",
        "[deployment]\nfirst_port = 20000\nlast_port = 20003",
        "a.toml: deployment: ports 20000 to 20003 are 4, this run needs 7",
    ),
    in_file(
        "phases longer than the update",
        "[weight_broadcast]\nstage_timeout_s = 400\ncommit_timeout_s = 300",
        "a.toml: weight_broadcast: stage_timeout_s = 400, commit_timeout_s = 300 must be below "
        "update_timeout_s = 300",
    ),
    in_file(
        "host that nobody can connect to",
        '[weight_broadcast]\nhost = "0.0.0.0"',
        'a.toml: weight_broadcast: host = "0.0.0.0" is no address that an engine can connect to; '
        "expected one of this machine",
    ),
    by_flags(
        "NCCL without CUDA",
        "--weight-broadcast.backend nccl",
        '--weight-broadcast.backend: weight_broadcast.backend = "nccl": this machine has no CUDA '
        'device; expected "gloo" or "auto"',
    ),
    by_flags(
        "a router that is not started here",
        "--orchestrator.model.client.router none",
        '--orchestrator.model.client.router: orchestrator.model.client.router = "none": '
        '`muster run` starts a vllm-router in regular mode; expected "vllm"',
    ),
    in_file(
        "samples longer than the model",
        "[model]\nmax_model_len = 64",
        "a.toml: orchestrator: rollouts.max_prompt_tokens = 64 plus "
        "rollouts.max_completion_tokens = 16 must not be above model.max_model_len = 64",
    ),
    in_file(
        "more groups wanted than there are",
        "[orchestrator.groups]\nmin_serving_groups = 3",
        "a.toml: orchestrator.groups.min_serving_groups = 3 is above the number of groups that "
        "are started, deployment.num_groups = 2",
    ),
    in_file(
        "lease shorter than its renewal",
        "[orchestrator.groups]\nlease_s = 1",
        "a.toml: orchestrator: groups.lease_s = 1 must be above probe.interval_s + "
        "probe.timeout_s = 1.8: probes renew the lease",
    ),
    in_file(
        "lease longer than engines allow",
        "[orchestrator.groups]\nlease_s = 600",
        "a.toml: orchestrator.groups.lease_s = 600 must not be above inference.max_lease_s = 60",
    ),
    in_file(
        "timeouts of rollouts do not nest",
        "[orchestrator.rollouts]\nrequest_timeout_s = 300",
        "a.toml: orchestrator.rollouts: request_timeout_s (300) must be below "
        "rollout_timeout_s (300)",
    ),
    in_file(
        "option that muster sets itself",
        "[inference.extra_args]\nport = 1",
        "a.toml: inference.extra_args: port cannot be set here: muster sets it",
    ),
    # -- all at once
    Row(
        "everything in one go",
        [
            'unexpected argument "oops"; values are given as `--section.key oops`',
            "b.toml: no such file; did you mean a.toml?",
            'a.toml: seed = "x": expected an integer',
            "a.toml: model.pth = 1: no such key; did you mean `model.path`?",
            'MUSTER_WANDB__MODE: wandb.mode = "onlin": expected one of offline, online, disabled; '
            'did you mean "online"?',
        ],
        ["oops", "@", "a.toml", "@", "b.toml"],
        {"a.toml": 'seed = "x"\n[model]\npth = 1'},
        {"MUSTER_WANDB__MODE": "onlin"},
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_whole_message(row: Row, tmp_path: Path) -> None:
    for name, text in row.files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_run_config(row.argv, environ=row.environ, directory=tmp_path, machine=NO_CUDA)
    count = len(row.says)
    head = f"muster run: {count} configuration error{'s' if count > 1 else ''}"
    assert caught.value.render("muster run") == "\n".join([head, *(f"  {s}" for s in row.says)])


ORCHESTRATOR_ROWS = [
    (
        "nothing to administer",
        "",
        "model.client.admin_base_url is required: the admin URL of each engine",
    ),
    (
        "groups against URLs",
        "--model.client.admin-base-url http://a:1 http://b:1 http://c:1 "
        "--model.client.admin-engine-groups 0 0 1 1",
        "--model.client.admin-base-url, --model.client.admin-engine-groups: model.client: "
        "admin_engine_groups has 4 entries, admin_base_url has 3: expected one group an engine",
    ),
    (
        "the same engine twice, spelled in two ways",
        "--model.client.admin-base-url http://127.0.0.1:80/ HTTP://127.0.0.1",
        "--model.client.admin-base-url: model.client: admin_base_url has http://127.0.0.1:80 "
        "more than once",
    ),
    (
        "the router among the engines",
        "--model.client.admin-base-url http://127.0.0.1:8000",
        "--model.client.admin-base-url: model.client: base_url = http://127.0.0.1:8000 is also in "
        "admin_base_url",
    ),
    (
        "a router that is not used",
        "--model.client.admin-base-url http://a:1 --model.client.router none "
        "--model.client.base-url http://b:1",
        "--model.client.admin-base-url, --model.client.router, --model.client.base-url: "
        'model.client: base_url = http://b:1 names a router, and router = "none": expected '
        'router = "vllm" or "vllm_pd", or no base_url',
    ),
    (
        "roles without groups for both",
        "--model.client.admin-base-url http://a:1 http://b:1 --model.client.router vllm_pd "
        "--model.client.admin-engine-groups 0 0",
        "--model.client.admin-base-url, --model.client.router, "
        '--model.client.admin-engine-groups: model.client: router = "vllm_pd" with '
        "admin_engine_groups = [0, 0]: expected at least two groups, one that prefills and one "
        "that decodes",
    ),
    (
        "a router of another kind",
        "--model.client.admin-base-url http://a:1 --model.client.router vlm",
        '--model.client.router: model.client.router = "vlm": expected one of vllm, vllm_pd, none; '
        'did you mean "vllm"?',
    ),
    (
        "no URL",
        "--model.client.admin-base-url 127.0.0.1:8001",
        '--model.client.admin-base-url: model.client.admin_base_url[0] = "127.0.0.1:8001": '
        "expected http://host:port",
    ),
    (
        "URL with a path",
        "--model.client.base-url http://a:1/v1 --model.client.admin-base-url http://b:1",
        '--model.client.base-url: model.client.base_url = "http://a:1/v1": '
        "expected http://host:port, without a path",
    ),
    (
        "group numbers with a hole",
        "--model.client.admin-base-url http://a:1 http://b:1 "
        "--model.client.admin-engine-groups 0 2",
        "--model.client.admin-base-url, --model.client.admin-engine-groups: model.client: "
        "admin_engine_groups = [0, 2] must name every group from 0 to the highest",
    ),
    (
        "own port taken by an engine",
        "--model.client.admin-base-url http://127.0.0.1:8100",
        "--model.client.admin-base-url: port = 8100 clashes with model.client.admin_base_url "
        "http://127.0.0.1:8100",
    ),
    (
        "own port taken by the trainer",
        "--model.client.admin-base-url http://127.0.0.1:1 --port 29400",
        "--model.client.admin-base-url, --port: port = 29400 clashes with trainer_url = "
        "http://127.0.0.1:29400",
    ),
    (
        "trainer out of reach",
        "--model.client.admin-base-url http://10.0.0.1:8001",
        "--model.client.admin-base-url: weight_broadcast.host = 127.0.0.1 cannot be reached from "
        "http://10.0.0.1:8001 (model.client.admin_base_url); expected an address that is routable "
        "from there",
    ),
]


@pytest.mark.parametrize(
    ("argv", "says"),
    [row[1:] for row in ORCHESTRATOR_ROWS],
    ids=[row[0] for row in ORCHESTRATOR_ROWS],
)
def test_whole_message_of_the_orchestrator(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["orchestrator", *argv.split()]) == USAGE_ERROR
    captured = capsys.readouterr()
    assert captured.err == f"muster orchestrator: 1 configuration error\n  {says}\n"
    assert captured.out == ""
