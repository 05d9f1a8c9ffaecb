"""Files of other programs become configs, and nothing that they say is lost."""

import json
import math
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from megatron_noloco.config import RunConfig
from megatron_noloco.config.programs import (
    DEEPSPEED,
    HUGGING_FACE,
    MEGATRON,
    PROGRAMS,
    TORCHTITAN,
    Carried,
    Program,
)
from megatron_noloco.convert.conversion import Conversion, account_lines, convert
from megatron_noloco.convert.given import literal, read
from megatron_noloco.convert.shell import Script, options
from megatron_noloco.engine.schedules import rates_in
from megatron_noloco.errors import UserError
from tests.kit.configs import FILES
from tests.kit.datasets import write_dataset
from tests.kit.golden import check
from tests.kit.ranks import call_here
from tests.kit.tokenizers import make_tokenizer

BASE = FILES.parents[1] / "configs" / "quickstart.json"

# Arguments of the command, without --output.
COMMANDS = [
    f"zero2.json --config {BASE.name}",
    f"offload.json --config {BASE.name}",
    f"auto.json trainer.yaml --config {BASE.name}",
    f"pretrain.json --config {BASE.name}",
    f"finetune.yaml --config {BASE.name}",
    "run_clm.sh --config quickstart.json",
    "llama.sh",
    "mixture.txt --world-size 8 --replicas 2",
    "gpt.yaml --world-size 4",
    "llama3.toml",
    f"qwen3.toml --config {BASE.name} --world-size 16 --replicas 4",
    f"mixture.toml --config {BASE.name}",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files, and the data and the tokenizer that they name."""
    folder = tmp_path_factory.mktemp("convert")
    shutil.copytree(FILES, folder, dirs_exist_ok=True)
    base = json.loads(BASE.read_text())
    base["model"] |= {"num_attention_heads": 4, "num_query_groups": 4}
    (folder / BASE.name).write_text(json.dumps(base))
    (folder / "tokenizer").mkdir()
    make_tokenizer(folder / "tokenizer")
    (folder / "corpus.txt").write_text("\n\n".join(f"A text of number {n}. " * 30 for n in range(60)))
    (folder / "data").mkdir()
    documents = [[n % 250 + 2 for n in range(length)] for length in range(40, 140)]
    write_dataset(folder / "data" / "corpus_text_document", documents, vocab_size=300)
    return folder


def run(command: str, output: Path) -> tuple[int, str, str]:
    return call_here("convert", *command.split(), "--output", str(output))


def test_files_become_these_configs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests/golden/convert.txt. A check accepts each."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: True)

    def said() -> Iterator[tuple[str, str]]:
        for number, command in enumerate(COMMANDS):
            output = tmp_path / f"{number}.json"
            exit_code, lines, errors = run(command, output)
            assert (exit_code, errors) == (0, "")
            assert call_here("config", "--check", output)[::2] == (0, "")
            content = json.dumps(json.loads(output.read_text()))
            yield command, f"{lines.replace(str(output), 'OUTPUT')}{content}"

    check("convert", said())


def account(conversion: Conversion) -> list[Any]:
    lists = (conversion.carried, conversion.renamed, conversion.meaningless, conversion.no_equal)
    return [setting for settings in lists for setting in settings if setting.file]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_in_one_list(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    files, *others = command.split(" --")
    paths, numbers = list(map(Path, files.split())), dict(option.split() for option in others)
    base = Path(numbers["config"]) if "config" in numbers else None
    conversion = convert(paths, base, int(numbers.get("world-size", 0)) or None)
    assert sorted(account(conversion)) == sorted(setting for path in paths for setting in read(path))


WITHOUT_FIELD = [
    word.replace("*", "zz")
    for word, row in MEGATRON.words.items()
    if not isinstance(row, Carried) and word.replace("_", "-") not in (FILES / "mixture.txt").read_text()
]


@given(
    st.dictionaries(st.sampled_from(WITHOUT_FIELD), st.sampled_from(["", "0", "1", "none", "1e-3", "a b"]))
)
def test_no_argument_is_lost(drawn: dict[str, str]) -> None:
    options = "".join(f"--{name.replace('_', '-')} {value}\n" for name, value in drawn.items())
    with TemporaryDirectory() as folder:
        path = Path(folder) / "arguments"
        path.write_text((FILES / "mixture.txt").read_text() + options)
        conversion = convert([path], world_size=8)
        assert sorted(account(conversion)) == sorted(read(path))
        assert drawn.keys() <= {setting.name for setting in (*conversion.meaningless, *conversion.no_equal)}


ENDINGS = {DEEPSPEED: "json", HUGGING_FACE: "json", TORCHTITAN: "toml", MEGATRON: "yaml"}
CARRIED = [
    (program, word)
    for program in ENDINGS
    for word, row in program.words.items()
    if isinstance(row, Carried) and "*" not in word
]
VALUES = st.sampled_from(
    [None, True, False, -1, 0, 1, 3, 0.5, 1e300, "", "x", "auto", "cosine", [], [1], {}, {"a": 1}]
)


@pytest.mark.parametrize("program", ENDINGS, ids=lambda program: program.name)
@given(st.data())
def test_any_values_become_a_config_or_lines(program: Program, data: st.DataObject) -> None:
    words = st.sampled_from([word for owner, word in CARRIED if owner is program])
    nested: dict[str, Any] = {}
    for word, value in data.draw(st.dictionaries(words, VALUES, min_size=1, max_size=12)).items():
        *blocks, name = word.split(".")
        block = nested
        for part in blocks:
            block = block.setdefault(part, {})
        block[name] = value
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tomllib, "loads", json.loads)
        path = Path(folder) / f"drawn.{ENDINGS[program]}"
        path.write_text(json.dumps(nested))
        with suppress(UserError):
            assert sorted(account(convert([path], BASE))) == sorted(read(path))


def test_settings_of_public_recipes_are_known() -> None:
    programs = {program.name: program for program in PROGRAMS}
    recipes = (FILES / "recipes.txt").read_text().split("\n\n")[1:]
    assert len(recipes) >= 10
    for recipe in recipes:
        _, program, *names = recipe.split("\n")
        for name in " ".join(names).split():
            assert programs[program].row(name.replace("-", "_")), (program, name)


def test_replicas_are_nodes_or_data_parallel_ranks(folder: Path) -> None:
    def layout(**given: Any) -> tuple[int, int, int]:
        content = convert([folder / "llama.sh"], **given).content
        return (
            content["parallel"]["replicas"],
            content["parallel"]["data_parallel_size"],
            content["gradient_accumulation_steps"],
        )

    assert layout() == (2, 2, 2)  # two nodes of four ranks, two of them tensor-parallel
    assert layout(replicas=4) == (4, 1, 2)
    assert layout(replicas=1) == (1, 4, 2)
    assert layout(world_size=16) == (2, 4, 1)


def test_a_single_replica_is_told(folder: Path) -> None:
    """As where expert parallelism takes all data-parallel ranks."""
    *_, last = account_lines(convert([folder / "mixture.txt"], None, 4, 1))
    assert last.startswith("parallel.replicas 1: no other replica to average with; more ranks make more")


def test_the_rest_may_give_the_layout(tmp_path: Path) -> None:
    path, rest = tmp_path / "arguments", tmp_path / "rest.json"
    path.write_text((FILES / "mixture.txt").read_text())
    rest.write_text('{"parallel": {"replicas": 2, "data_parallel_size": 4}}')
    assert convert([path], rest).content == convert([path], world_size=8, replicas=2).content


def test_a_schedule_has_the_rates_of_megatron(folder: Path) -> None:
    run = load_config_of(convert([folder / "llama.sh"]))
    schedule = run.as_deepspeed()["scheduler"]
    rates = [rates[0] for rates in rates_in(schedule, [3e-3], range(1, 41)).values()]
    for step, rate in enumerate(
        rates, start=1
    ):  # warm-up over a tenth of 30 steps, half a cosine, then the lowest
        share = min(max(step - 1 - 3, 0) / 27, 1)
        expected = 3e-3 * step / 3 if step <= 3 else 3e-4 + 2.7e-3 * (1 + math.cos(math.pi * share)) / 2
        assert rate == pytest.approx(expected, rel=1e-6), step


def test_what_is_of_another_schedule_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "arguments"
    text = (FILES / "mixture.txt").read_text()
    path.write_text(text.replace("--lr-decay-style=WSD", "--lr-decay-style=cosine"))
    conversion = convert([path], world_size=8)
    params = conversion.content["scheduler"]["params"]
    assert (params["decay_type"], params["decay_num_steps"]) == ("cosine", 18)
    unused = {setting.name for setting in conversion.meaningless}
    assert {"lr_wsd_decay_samples", "lr_wsd_decay_style"} <= unused


def load_config_of(conversion: Conversion) -> RunConfig:
    return RunConfig(**conversion.content)


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.json"])
def test_a_folder_of_hugging_face_gives_sizes_and_weights(file: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=300).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "model" / file)
    path = tmp_path / "finetune.yaml"
    name = str(tmp_path / "model")
    path.write_text((FILES / path.name).read_text().replace("example/small-model", name))
    content = convert([path], BASE).content
    assert content["training"]["pretrained"] == content["data"]["tokenizer_model"] == name
    assert content["model"] | {"family": "llama", "hidden_size": 64, "seq_length": 128} == content["model"]


def test_deepspeed_and_megatron_may_say_the_same(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    given = {"train_batch_size": 16, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    path.write_text(json.dumps(given | {"zero_optimization": {"stage": 1}}))
    both, alone = convert([folder / "llama.sh", path]), convert([folder / "llama.sh"])
    assert both.content == {**alone.content, "zero_optimization": {"stage": 1}}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("squared_relu: true", "squared_relu"),
        ("normalization: RMSNorm\nactivation_func: gelu", "activation_func"),
        ("qk_layernorm: true", "disable_bias_linear"),
        ("use_rope_scaling: true", "use_rope_scaling"),
    ],
)
def test_a_model_that_no_family_has_is_told(change: str, field: str, tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(f"{(FILES / path.name).read_text()}{change}\n")
    told = {setting.name for setting in convert([path], world_size=4).no_equal}
    assert field in told


def test_weights_and_biases_is_on_only_where_a_file_says_so(tmp_path: Path) -> None:
    def wandb(options: str) -> Any:
        path = tmp_path / "arguments"
        path.write_text((FILES / "mixture.txt").read_text() + options)
        return convert([path], world_size=8).content.get("wandb")

    assert wandb("--wandb-exp-name=x") is None
    expected = {"enabled": True, "project": "p", "group": "x"}
    assert wandb("--wandb-exp-name=x --wandb-project=p") == expected


def test_the_trainer_fills_in_what_deepspeed_leaves_to_it(folder: Path) -> None:
    content = convert([folder / "auto.json", folder / "trainer.yaml"], folder / BASE.name).content
    assert content["optimizer"] == {
        "type": "AdamW",
        "params": {"lr": 3e-4, "weight_decay": 0.05, "betas": [0.9, 0.95], "eps": 1e-8},
    }
    assert content["scheduler"]["params"]["warmup_num_steps"] == 4
    assert (content["train_micro_batch_size_per_gpu"], content["gradient_accumulation_steps"]) == (4, 3)
    assert content["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=3\npython x.py --a $A --b '$A' --c \"x $A\"", {"a": 3, "b": "$A", "c": "x 3"}),
        ("A=(1 '2 3')\npython x.py --a ${A[@]} --b \"${A[@]}\"", {"a": [1, 2, 3], "b": [1, "2 3"]}),
        ("A+=' --b'\npython x.py --a 1 $A", {"a": 1, "b": True}),
        ("python x.py --a 1 \\\n  --b 2 # --c 3", {"a": 1, "b": 2}),
        ("A=''\npython x.py --a \"\" $A --b", {"a": "", "b": True}),
        ("python x.py --a ${B:-5} --b x#y", {"a": 5, "b": "x#y"}),
        ("if [ 2 -gt 1 ]; then A=1; else A=2; fi\npython x.py --a $A", {"a": 1}),
        (
            "M=${1:-mock}\nif [[ $M == x ]] || [[ $M == mock ]]; then A=1\n"
            "elif [[ 1 = 1 ]] || [[ 1 = 1 ]]; then A=2; fi\n"
            "if [[ $M == mock ]] && [[ $A == 2 ]]; then A=3; fi\npython x.py --a $A",
            {"a": 1},
        ),
        ('M=x\nif [ -n "$M" ] && [ $M != y ]; then A=1; fi\npython x.py --a $A', {"a": 1}),
        ("cat <<EOT > f\nit's --a 1\nEOT\npython x.py --b 2 > log", {"b": 2}),
        ('run="python x.py --a 1 &> log"\necho $run\neval $run', {"a": 1}),
        ("--a 1\n--b=2e-3 --c -1", {"a": 1, "b": 0.002, "c": -1}),
        ('ARGS=" --a 1 \\\n --b "', {"a": 1, "b": True}),
    ],
)
def test_a_script_is_read_as_a_shell_would(text: str, expected: dict[str, Any]) -> None:
    script = Script(text)
    found = {name: [literal(word) for word in words] for name, words in options(script.arguments())}
    assert {name: words[0] if len(words) == 1 else words or True for name, words in found.items()} == expected


@pytest.mark.parametrize(
    ("argument", "instead", "field", "value"),
    [
        (
            "--sequence-parallel",
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "parallel.virtual_pipeline_model_parallel_size",
            2,
        ),
        ("--train-iters 40", "--train-tokens 327680", "training.train_iters", 160),
        ("--adam-beta2 .95", "--optimizer sgd --sgd-momentum 0.8", "optimizer.params.momentum", 0.8),
        ("--swiglu", "--swiglu --add-qkv-bias", "model.family", "qwen2"),
    ],
)
def test_fields_that_follow_from_arguments(
    argument: str, instead: str, field: str, value: Any, tmp_path: Path
) -> None:
    path = tmp_path / "llama.sh"
    path.write_text((FILES / path.name).read_text().replace(argument, instead))
    found: Any = convert([path]).content
    for name in field.split("."):
        found = found[name]
    assert found == value


def test_what_the_files_lack_is_named(folder: Path, tmp_path: Path) -> None:
    code, _, errors = call_here("convert", folder / "offload.json", "--output", tmp_path / "run.json")
    assert code == 2
    assert "the files do not say it: model is missing" in errors
    assert not (tmp_path / "run.json").exists()


def test_the_rest_may_be_a_part_of_a_config(folder: Path, tmp_path: Path) -> None:
    rest = tmp_path / "rest.json"
    rest.write_text('{"noloco": {"local_steps": 20}}')
    assert convert([folder / "llama.sh"], rest).content["noloco"] == {"local_steps": 20}
